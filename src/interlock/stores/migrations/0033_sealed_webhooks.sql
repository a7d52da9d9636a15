-- Secrets of webhooks are sealed like those of services and orgs. The key that seals them is no part of the database, so
-- the first process that starts on this schema seals what is stored, and empties `secret` and `previous_secret`.
alter table interlock.webhooks
    alter column secret drop not null,
    add column sealed bytea,
    add column previous_sealed bytea;
alter table interlock.hooks
    add column sealed bytea,                        -- null for a hook whose calls carry the secret: see secret_hash
    add column previous_sealed bytea;

-- Remembered replies contain the secrets in clear. A repeated request from before gets a conflict.
delete from interlock.idempotency_keys where endpoint like '/v1/webhooks%';
