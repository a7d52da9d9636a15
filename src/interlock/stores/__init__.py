"""Stores: PostgreSQL, Valkey, objects, KMS and STS; the embedded servers; the migrations."""
