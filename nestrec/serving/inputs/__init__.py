"""Request and response schemas, and the conversion of request bodies into model inputs and engine requests."""
