"""Who may do what: API keys, worker tokens, capability tokens and the keys that sign them."""
