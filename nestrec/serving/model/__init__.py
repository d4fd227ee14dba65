"""A servable model: export, folder, tables, inputs, and how each kind reads them."""
