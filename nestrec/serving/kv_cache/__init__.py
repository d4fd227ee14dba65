"""The KV cache: page pool, prefix cache with device and host tiers, and the trigger of pre-infer requests."""
