"""Open-loop load tests of engines and running servers, in which stalls are not hidden."""
