"""Validator for the part of JSON Schema that the server's OpenAPI document uses."""

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def check_schema(value, schema, openapi, where="response"):
    """Check a value against a schema.

    Args:
        value: Parsed JSON value.
        schema: Its schema.
        openapi: OpenAPI document that contains the referenced schemas.
        where: Path of the value, for error messages.

    Raises:
        AssertionError: The value does not match; the message contains the path of the first difference.
    """
    if "$ref" in schema:
        schema = openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        matches = any(_matches(value, part, openapi) for part in schema["anyOf"])
        assert matches, f"{where} matches none of {schema['anyOf']}"
    if "enum" in schema:
        assert value in schema["enum"], f"{where} is not one of {schema['enum']}"
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = tuple(TYPES[name] for name in names)
        assert isinstance(value, kinds), f"{where} is not of type {schema['type']}: {value!r}"
        assert "boolean" in names or not isinstance(value, bool), f"{where} is a boolean"
    if isinstance(value, list):
        for number, inner in enumerate(value):
            check_schema(inner, schema.get("items", {}), openapi, f"{where}[{number}]")
    if isinstance(value, dict):
        _check_object(value, schema, openapi, where)


def _check_object(value, schema, openapi, where):
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        assert name in value, f"{where} lacks {name}"
    for name, inner in value.items():
        assert name in properties or others is not False, f"{where}.{name} is not in the schema"
        check_schema(inner, properties.get(name, others), openapi, f"{where}.{name}")


def _matches(value, schema, openapi):
    try:
        check_schema(value, schema, openapi)
    except AssertionError:
        return False
    return True
