"""What a batch has in flight between its keys and its written-back rows."""
