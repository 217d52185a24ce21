"""Our package's own model, worker and platform on the emulated device."""
