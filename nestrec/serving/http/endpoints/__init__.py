"""The routes of this package, one file a kind; `built_in` lists them."""
