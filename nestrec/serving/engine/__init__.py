"""The engine: plan, launch, complete, on one thread that owns the device."""
