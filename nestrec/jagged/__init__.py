"""The one value type for jagged data, with conversions to torch.nested and TorchRec's KeyedJaggedTensor."""

from nestrec.jagged.jagged import Jagged, from_keyed_jagged, offsets_of, to_keyed_jagged

__all__ = ["Jagged", "from_keyed_jagged", "offsets_of", "to_keyed_jagged"]
