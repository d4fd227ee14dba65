"""What is learnt: samples, tables, model, loss and metrics of retrieval, ranking and labelled rows."""
