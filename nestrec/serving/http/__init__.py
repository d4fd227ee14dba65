"""The HTTP front: raw ASGI over the engines."""
