"""Servable models (exported model folders): loading, embedding tables, item search, and model adapters."""
