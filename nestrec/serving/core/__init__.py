"""Building blocks shared by all parts of the server: limits, rejections, cost model, routing, tracing."""
