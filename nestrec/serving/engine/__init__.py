"""The serving engine: schedules, launches and completes batches on one thread that owns the device."""
