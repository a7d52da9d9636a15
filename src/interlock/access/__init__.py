"""Authentication and authorization: principals, API keys, OpenID Connect, capability tokens, signed URLs, secrets."""

PUBLIC = (
    "build",
    "guards",
    "jwt",
    "keyring",
    "object_tokens",
    "principals",
    "secrets",
    "prefixes",
    "sessions",
    "signed_urls",
    "tokens",
)
"""Modules that other capabilities may import. tests/docs checks it."""
