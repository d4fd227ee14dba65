"""The simulator against measurements, and the measurements it is fitted to."""
