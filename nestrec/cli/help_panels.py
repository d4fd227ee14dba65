"""Panels of the help texts: groups of commands, and the most used dotted options of a command.

Dotted options are fields of configs, whose modules are slow to import. Their descriptions for the help are therefore
repeated here; `nestrec options COMMAND` and the documentation list all options.
"""

from collections.abc import Mapping

COMMAND_PANELS: Mapping[str, tuple[str, ...]] = {
    "Data": ("prepare", "append", "compact", "restore", "describe", "formats"),
    "Train and evaluate": ("train", "train-stream", "tune", "eval", "report", "recipes"),
    "Export and publish": ("export", "publish", "recommend", "embed"),
    "Serve": ("serve", "create-key", "health"),
    "Operate a fleet": ("swap", "rollback", "scale", "status"),
    "Tools": ("demo", "launch", "plan", "options", "doctor", "bench", "load-test"),
}
"""Commands of each panel of `nestrec --help`, in the order of the help."""

COMMON_PANEL = "Common options of the configuration"

COMMON_OPTIONS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "train": (
        ("--data.folder", "FOLDER", "Dataset folder that `nestrec prepare` wrote."),
        ("--training.epochs", "N", "Number of passes over the training samples."),
        ("--training.max_steps", "N", "Maximum number of training steps; overrides the epochs."),
        ("--training.device", "DEVICE", "cpu, cuda, or auto: a GPU if available."),
        ("--training.seed", "N", "Random seed of weights, sample order and negatives."),
        ("--batch.batch_size", "N", "Number of samples per step, over all ranks."),
        ("--optimizer.learning_rate", "FLOAT", "Learning rate of the dense weights."),
        ("--task.encoder.dim", "N", "Width of the model and of the item embeddings."),
        ("--tables.NAME.store", "TIER", "Storage of an embedding table: device, dram or disk."),
    ),
    "serve": (
        ("--host", "ADDRESS", "Address to listen on; other machines need API keys, TLS or --insecure."),
        ("--port", "N", "Port to listen on; 0 selects a free port."),
        ("--device", "DEVICE", "cpu, cuda, or auto: a GPU if available."),
        ("--num_instances", "N", "Number of server processes behind the load balancer."),
        ("--load_balancer", "NAME", "none, gateway or ray."),
        ("--frontend_workers", "N", "Number of processes that parse HTTP."),
        ("--security.api_keys", "FILE", "Key file of `nestrec create-key`."),
        ("--history_store.url", "URL", "Redis or Valkey server that stores the events of users."),
        ("--service.engines_per_model", "N", "Number of engines per model."),
    ),
}
"""Name, placeholder and description of the most used dotted options, by command."""


def panel_of(command: str) -> str:
    """Return the panel of a command; commands that no panel lists are tools."""
    return next((panel for panel, names in COMMAND_PANELS.items() if command in names), "Tools")
