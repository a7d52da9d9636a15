"""HTTP servers: connections and their limits, listeners, decoding, problems, OpenAPI."""
