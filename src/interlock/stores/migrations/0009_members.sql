-- Users whom an identity provider knows, and signing keys that are kept in AWS KMS.

-- What a user of the provider may do is said here and nowhere else: nothing in a token adds to it.
create table interlock.members (
    issuer  text not null,
    subject text not null,
    org_id  uuid not null references interlock.orgs,
    role    interlock.role not null,
    since   timestamptz not null default interlock.clock(),
    "by"    text not null,                          -- who said so
    primary key (issuer, subject, org_id)
);
create index members_by_org on interlock.members (org_id, issuer, subject);

-- A key that a rotation made goes when its last token has expired; one that an operator named is the operator's.
alter table interlock.signing_keys
    add column kms_key   text,                      -- what KMS calls it; null: a PEM file named after its kid
    add column made_here boolean not null default true;
