-- Sessions of people in the dashboard, and links that sign in once. Stores only hashes of secrets.

-- name: insert_session^
insert into interlock.sessions (session_id, org_id, key_id, issuer, subject, csrf, secret_hash, expires_at)
values (:session_id, :org_id, :key_id, :issuer, :subject, :csrf, :secret_hash,
        interlock.clock() + make_interval(secs => :seconds::float8))
returning created_at, expires_at;

-- name: find_session^
-- The session, with the present rights of its key or member. The id names it; the org is that of the row.
select s.session_id, s.org_id, o.name as org, s.key_id, s.issuer, s.subject, s.csrf, s.secret_hash, s.previous_hash,
       s.created_at, s.expires_at, k.user_name, coalesce(k.role, m.role) as role, k.scopes, k.service,
       s.rotated_at > interlock.clock() - make_interval(secs => :grace_seconds::float8) as within_grace,
       s.rotated_at < interlock.clock() - make_interval(secs => :rotate_seconds::float8) as due,
       s.revoked_at is null and s.expires_at > interlock.clock()
           and s.rotated_at > interlock.clock() - make_interval(secs => :idle_seconds::float8)
           and (case when s.key_id is null then m.role is not null
                     else k.revoked_at is null and (k.expires_at is null or k.expires_at > interlock.clock()) end) as live
from interlock.sessions s
join interlock.orgs o on o.org_id = s.org_id
left join interlock.api_keys k on k.key_id = s.key_id and k.org_id = s.org_id
left join interlock.members m on m.issuer = s.issuer and m.subject = s.subject and m.org_id = s.org_id
where s.session_id = :session_id;

-- name: live_sessions
-- Those that may still read, of the sessions with open streams.
select s.session_id from interlock.sessions s
left join interlock.api_keys k on k.key_id = s.key_id and k.org_id = s.org_id
left join interlock.members m on m.issuer = s.issuer and m.subject = s.subject and m.org_id = s.org_id
where s.session_id = any(:session_ids::text[]) and s.org_id = :org_id
  and s.revoked_at is null and s.expires_at > interlock.clock()
  and s.rotated_at > interlock.clock() - make_interval(secs => :idle_seconds::float8)
  and (case when s.key_id is null then m.role is not null
            else k.revoked_at is null and (k.expires_at is null or k.expires_at > interlock.clock()) end);

-- name: rotate_session^
-- Of two tabs that ask at the same time, one rotates.
update interlock.sessions set previous_hash = secret_hash, secret_hash = :fresh, rotated_at = interlock.clock()
where session_id = :session_id and secret_hash = :known and revoked_at is null
returning session_id;

-- name: revoke_session^
update interlock.sessions set revoked_at = coalesce(revoked_at, interlock.clock())
where session_id = :session_id and org_id = :org_id
  and (:key_id::text is null or key_id = :key_id) and (:subject::text is null or subject = :subject)
returning session_id, (select name from interlock.orgs o where o.org_id = sessions.org_id) as org, key_id,
          coalesce(subject, (select user_name from interlock.api_keys k where k.key_id = sessions.key_id)) as user_name,
          rotated_at, created_at, expires_at;

-- name: sessions_of
-- By id. Only sessions that have not expired; of one user, or of all of the org.
select s.session_id, o.name as org, s.key_id, coalesce(s.subject, k.user_name) as user_name, s.rotated_at, s.created_at,
       s.expires_at
from interlock.sessions s
join interlock.orgs o on o.org_id = s.org_id
left join interlock.api_keys k on k.key_id = s.key_id
where s.org_id = :org_id and s.revoked_at is null and s.session_id > :after
  and s.expires_at > interlock.clock()
  and s.rotated_at > interlock.clock() - make_interval(secs => :idle_seconds::float8)
  and (:key_id::text is null or s.key_id = :key_id) and (:subject::text is null or s.subject = :subject)
order by s.session_id limit :limit;

-- name: insert_link^
insert into interlock.sign_in_links (token_hash, key_id, expires_at)
values (:token_hash, :key_id, interlock.clock() + make_interval(secs => :seconds::float8))
returning expires_at;

-- name: use_link^
-- Deletes the link, so that it works once, and returns the key if both are still valid.
with used as (
    delete from interlock.sign_in_links where token_hash = :token_hash returning key_id, expires_at
)
select k.key_id, k.org_id, o.name as org, k.user_name, k.role, k.scopes, k.service
from used u
join interlock.api_keys k on k.key_id = u.key_id
join interlock.orgs o on o.org_id = k.org_id
where u.expires_at > interlock.clock() and k.revoked_at is null and (k.expires_at is null or k.expires_at > interlock.clock());

-- name: delete_expired_sessions
delete from interlock.sessions where ctid = any(array(
    select ctid from interlock.sessions where expires_at <= interlock.clock() limit :limit for update skip locked))
returning session_id;

-- name: delete_expired_links
delete from interlock.sign_in_links where ctid = any(array(
    select ctid from interlock.sign_in_links where expires_at <= interlock.clock() limit :limit for update skip locked))
returning key_id;
