"""From a trained run to a servable folder, or to a published version."""
