"""What Python users call: train, evaluate, load. `import nestrec` hands it on, and the commands are built on it."""
