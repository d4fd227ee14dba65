"""HTTP server: endpoints, limits, metrics and logs of an ASGI application on uvicorn."""
