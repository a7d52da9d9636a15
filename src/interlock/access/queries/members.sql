-- Users of the identity provider, and their roles in orgs.

-- name: roles_of
-- Read with every request of such a user, so that a removed member loses access immediately.
select m.org_id, o.name as org, m.role
from interlock.members m join interlock.orgs o on o.org_id = m.org_id
where m.issuer = :issuer and m.subject = :subject order by o.name limit 1000;

-- name: allow_member^
insert into interlock.members (issuer, subject, org_id, role, "by")
values (:issuer, :subject, :org_id, :role, :by)
on conflict (issuer, subject, org_id) do update set role = excluded.role, since = interlock.clock(), "by" = excluded."by"
returning subject, (select name from interlock.orgs o where o.org_id = members.org_id) as org, role, since, "by";

-- name: disallow_member^
delete from interlock.members m where m.issuer = :issuer and m.subject = :subject and m.org_id = :org_id
returning m.subject, (select name from interlock.orgs o where o.org_id = m.org_id) as org, m.role, m.since, m."by";

-- name: members_of
select m.subject, o.name as org, m.role, m.since, m."by"
from interlock.members m join interlock.orgs o on o.org_id = m.org_id
where m.org_id = :org_id and m.issuer = :issuer and m.subject > :after order by m.subject limit :limit;
