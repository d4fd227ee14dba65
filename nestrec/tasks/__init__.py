"""Tasks (learning objectives): the samples, tables, model, loss and metrics of retrieval, ranking and CTR."""
