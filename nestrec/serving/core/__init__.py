"""What every part of the server uses: limits, rejections, cost model, routing, tracing."""
