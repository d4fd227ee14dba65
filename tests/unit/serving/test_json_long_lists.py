"""Long JSON lists are parsed as arrays, with the same values and errors as orjson for any text."""

import random

import orjson
import pytest

from nestrec.serving.core.asgi import parse_json
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.core.typed_list import TypedList
from nestrec.serving.inputs.json_long_lists import loads
from nestrec.serving.inputs.request_schema import RankRequest, reader
from nestrec.serving.model.item_id_map import ItemIds

PADDING = {"padding": "x" * 3000}
LISTS = {
    "numbers": [0, 7, -7, 10**17, *range(40)],
    "texts": ["0", "7", "-7", str(10**17), *map(str, range(40))],
    "words": ["click", None, "", "a b", "like"] * 8,
    "null": [None] * 30,
}
OTHER_LISTS = {
    "short": [1, 2, 3],
    "empty": [],
    "a float": [*range(30), 1.5],
    "true": [*range(30), True],
    "long": [*range(30), 10**18],
    "a mixture": [*range(30), "1"],
    "leading zeros": [*map(str, range(30)), "007"],
    "minus zero": [*map(str, range(30)), "-0"],
    "many words": [f"w{i}" for i in range(30)],
    "escapes": ["a\nb", 'c"d'] * 20,
    "other letters": ["é"] * 30,
    "lists": [[1] * 20] * 20,
    "objects": [{"a": [1, 2]}] * 20,
    "a long word": ["w" * 100] * 30,
}


def plain(value):
    """Return the value with each TypedList converted to a list."""
    match value:
        case TypedList():
            return list(value)
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case list():
            return [plain(inner) for inner in value]
        case _:
            return value


def dump(data, spaces):
    return orjson.dumps(data, option=orjson.OPT_INDENT_2 if spaces else 0)


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_json_number_list_is_parsed_as_array(name, spaces):
    found = loads(dump({"a": LISTS[name], "b": {"c": LISTS[name]}, **PADDING}, spaces))
    for read in (found["a"], found["b"]["c"]):
        assert isinstance(read, TypedList)
        assert list(read) == LISTS[name]
        assert [type(value) for value in read] == [type(value) for value in LISTS[name]]
        assert (read[3], list(read[2:5]), len(read)) == (LISTS[name][3], LISTS[name][2:5], len(LISTS[name]))
        assert read.types == set(map(type, LISTS[name]))


@pytest.mark.parametrize("name", OTHER_LISTS)
def test_json_list_parser_leaves_other_lists_to_orjson(name):
    data = {"a": OTHER_LISTS[name], "b": LISTS["numbers"], **PADDING}
    found = loads(orjson.dumps(data))
    assert (type(found["a"]), type(found["b"])) == (list, TypedList)
    assert plain(found) == data


def test_json_list_parser_equals_orjson_for_any_text():
    """Documents with random changes, deletions and repetitions are parsed equally, or rejected by both parsers."""
    rng = random.Random(1)
    num_read = 0
    document = orjson.dumps({**LISTS, "in": {**OTHER_LISTS, 'a "key" [1': "[1,2,3]"}, **PADDING})
    for _ in range(600):
        text = bytearray(document)
        for _ in range(rng.randrange(3)):
            start = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    text[start] = rng.choice(b'[]{}",:-0 9n\\.e\x00\xff')
                case 1:
                    del text[start : start + rng.randrange(1, 9)]
                case _:
                    text[start:start] = text[start : start + rng.randrange(1, 40)]
        try:
            expected = orjson.loads(bytes(text))
        except orjson.JSONDecodeError:
            with pytest.raises(orjson.JSONDecodeError):
                loads(bytes(text))
        else:
            num_read += 1
            assert plain(loads(bytes(text))) == expected
    assert num_read > 100


@pytest.mark.parametrize("key", ["items", "[1]"])
def test_json_list_parser_rejects_list_as_field_name(key):
    with pytest.raises(orjson.JSONDecodeError):
        loads(b'{%b:1,"p":"%b"}' % (orjson.dumps(list(range(50))), b"x" * 3000))
    with pytest.raises(orjson.JSONDecodeError):
        loads(b'{"%b":%b "p":"%b"}' % (key.encode(), orjson.dumps(list(range(50))), b"x" * 3000))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("candidates", [1.5] * 700),
        ("candidates", [None] * 700),
        ("candidates", list(range(700))),
        ("candidates", list(map(str, range(700)))),
        ("candidates", ["w" * 9] * 700),
        ("candidates", list(range(3000))),
        ("candidates", [str(10**17)] * 300),
        ("user", list(range(700))),
        ("timeout_ms", list(range(700))),
        ("history", {"items": list(range(700)), "times_ms": list(range(700))}),
        ("history", {"items": list(range(700)), "times_ms": [-1, *range(700)]}),
        ("history", {"items": list(range(700)), "times_ms": list(map(str, range(700)))}),
        ("history", {"items": list(range(700)), "actions": ["click", None] * 350}),
        ("history", {"items": list(range(700)), "features": {"tab": [None] * 700}}),
        ("candidate_features", {"tab": ["home", None] * 350}),
    ],
)
def test_json_list_parser_errors_equal_orjson(field, values):
    read = reader(RankRequest, LimitsConfig(max_item_id_length=8))
    body = orjson.dumps({"user": "ann", "candidates": ["5"], field: values})
    outcomes = []
    for data in (loads(body), orjson.loads(body)):
        try:
            read(data)
            outcomes.append("read")
        except BadRequestError as error:
            outcomes.append(f"{error.field}: {error.message}")
    assert len(body) > 2048
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("keys", [[str(i) for i in range(5, 400)], [str(1000 * i) for i in range(50)], ["a", "b"]])
def test_json_list_parser_ids_equal_those_of_list(keys):
    ids = ItemIds(keys)
    numbers = [*range(-3, 600), 49_000]
    for values in (numbers, [*map(str, numbers)], ["a", "c", "b"] * 300):
        read = loads(orjson.dumps({"a": values, **PADDING}))["a"]
        assert isinstance(read, TypedList)
        assert ids.of(read).tolist() == ids.of(values).tolist()


@pytest.mark.parametrize("opened", [b"[", b'{"a":'])
def test_json_list_parser_finds_lists_at_any_depth(opened):
    depth = 1_000
    closed = b"]" if opened == b"[" else b"}"
    found = loads(opened * depth + b'{"a":[' + b",".join([b"7"] * 2_000) + b"]}" + closed * depth)
    for _ in range(depth):
        (found,) = found if isinstance(found, list) else found.values()
    assert list(found["a"]) == [7] * 2_000


@pytest.mark.parametrize("error", [RecursionError, MemoryError, ValueError, KeyError])
def test_json_parser_exception_rejects_body(error):
    def fail(_):
        raise error("3")

    with pytest.raises(BadRequestError, match="not valid JSON"):
        parse_json(b"{}", fail)
