"""Does a value have the JSON Schema that OpenAPI gives for it? As much of JSON Schema as the front uses."""

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def check_schema(value, schema, described, where="answer"):
    """Raises AssertionError with the place that differs."""
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        assert any(_fits(value, part, described) for part in schema["anyOf"]), f"{where} is none of {schema['anyOf']}"
    if "enum" in schema:
        assert value in schema["enum"], f"{where} is not one of {schema['enum']}"
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = tuple(TYPES[name] for name in names)
        assert isinstance(value, kinds), f"{where} is no {schema['type']}: {value!r}"
        assert "boolean" in names or not isinstance(value, bool), f"{where} is true or false"
    if isinstance(value, list):
        for number, inner in enumerate(value):
            check_schema(inner, schema.get("items", {}), described, f"{where}[{number}]")
    if isinstance(value, dict):
        _check_object(value, schema, described, where)


def _check_object(value, schema, described, where):
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        assert name in value, f"{where} lacks {name}"
    for name, inner in value.items():
        assert name in properties or others is not False, f"{where}.{name} is not described"
        check_schema(inner, properties.get(name, others), described, f"{where}.{name}")


def _fits(value, schema, described):
    try:
        check_schema(value, schema, described)
    except AssertionError:
        return False
    return True
