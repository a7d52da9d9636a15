-- The statement of a user's query, shown to its author alone. Null for queries of tasks, and for text that cannot be stored.
alter table interlock.query_audit add column statement text;
