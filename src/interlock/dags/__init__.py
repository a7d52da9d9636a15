"""DAGs as files say them: read, checked, hashed, compared and drawn. Nothing here needs a database."""
