-- Orgs, API keys, worker tokens, signing keys. Stores only hashes of secrets and public keys.

-- name: insert_org^
insert into interlock.orgs (name) values (:name) on conflict (name) do nothing returning org_id, name;

-- name: org_by_name^
select org_id, name, operators from interlock.orgs where name = :name;

-- name: insert_key^
-- Returns no row if the service does not exist.
insert into interlock.api_keys (key_id, org_id, user_name, role, scopes, service, secret_hash, expires_at)
select :key_id, :org_id, :user_name, :role, :scopes, :service, :secret_hash,
       interlock.clock() + make_interval(secs => :seconds::float8)
where :service::text is null
   or exists (select from interlock.services s where s.org_id = :org_id and s.name = :service)
returning key_id, (select name from interlock.orgs o where o.org_id = api_keys.org_id) as org, user_name, role, scopes,
          service, created_at, expires_at, revoked_at;

-- name: find_key^
select k.key_id, k.org_id, o.name as org, k.user_name, k.role, k.scopes, k.service, k.secret_hash,
       k.revoked_at is not null as revoked, k.expires_at <= interlock.clock() as expired
from interlock.api_keys k join interlock.orgs o on o.org_id = k.org_id where k.key_id = :key_id;

-- name: list_keys
select k.key_id, o.name as org, k.user_name, k.role, k.scopes, k.service, k.created_at, k.expires_at, k.revoked_at
from interlock.api_keys k join interlock.orgs o on o.org_id = k.org_id
where k.org_id = :org_id order by k.created_at, k.key_id limit 1000;

-- name: revoke_key^
update interlock.api_keys k set revoked_at = coalesce(k.revoked_at, interlock.clock())
where k.key_id = :key_id and k.org_id = :org_id
returning k.key_id, (select name from interlock.orgs o where o.org_id = k.org_id) as org, k.user_name, k.role, k.scopes,
          k.service, k.created_at, k.expires_at, k.revoked_at;

-- name: insert_worker_token^
insert into interlock.worker_tokens (token_id, name, runtimes, secret_hash, expires_at)
values (:token_id, :name, :runtimes, :secret_hash, interlock.clock() + make_interval(secs => :seconds::float8))
returning token_id, name, runtimes, created_at, expires_at, revoked_at;

-- name: find_worker_token^
select token_id, name, runtimes, secret_hash, revoked_at is not null as revoked, expires_at <= interlock.clock() as expired
from interlock.worker_tokens where token_id = :token_id;

-- name: list_worker_tokens
select token_id, name, runtimes, created_at, expires_at, revoked_at from interlock.worker_tokens
order by created_at limit 1000;

-- name: revoke_worker_token^
update interlock.worker_tokens set revoked_at = coalesce(revoked_at, interlock.clock()) where token_id = :token_id
returning token_id, name, runtimes, created_at, expires_at, revoked_at;

-- name: retire_signing_keys!
-- Their public keys stay until the last token they signed has expired.
update interlock.signing_keys
set retired_at = interlock.clock(), verify_until = interlock.clock() + make_interval(secs => :seconds::float8)
where retired_at is null;

-- name: insert_signing_key^
insert into interlock.signing_keys (kid, public_jwk, kms_key, made_here)
values (:kid, :public_jwk::text::jsonb, :kms_key, :made_here)
returning kid, created_at, retired_at, verify_until;

-- name: signing_key^
select kid, kms_key, public_jwk from interlock.signing_keys where kid = :kid;

-- name: active_signing_key^
select kid, public_jwk from interlock.signing_keys where retired_at is null;

-- name: verifying_keys
select kid, public_jwk, retired_at, verify_until, created_at from interlock.signing_keys
where retired_at is null or verify_until > interlock.clock() order by created_at desc;

-- name: delete_dead_signing_keys
delete from interlock.signing_keys where verify_until <= interlock.clock() returning kid, kms_key, made_here;

-- name: insert_capability$
-- Lives as long as any token that may refer to it: renewed tokens keep the id.
insert into interlock.capabilities (task_id, attempt, grants, expires_at)
values (:task_id, :attempt, :grants::text::json, interlock.clock() + make_interval(secs => :seconds::float8))
returning capability_id;

-- name: renew_capability!
update interlock.capabilities set expires_at = interlock.clock() + make_interval(secs => :seconds::float8)
where capability_id = :capability_id;

-- name: find_capability^
select task_id, attempt, grants from interlock.capabilities
where capability_id = :capability_id and expires_at > interlock.clock();
