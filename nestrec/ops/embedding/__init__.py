"""Rows of tables on the device: deduplicate, gather, sum, update, move."""
