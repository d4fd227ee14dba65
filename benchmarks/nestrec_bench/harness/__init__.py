"""What benches share: result files, ranks, limited links, lengths, clocks."""
