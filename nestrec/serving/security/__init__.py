"""Who may ask a server for what: keys, roles, rates, certificates, and where a server may listen without them."""
