-- The part of the data database that block_follower needs. Run at every start of one, under an advisory lock.
--
--   followers ── one row per dataset version: its holder and its position
--   followed_blocks ── hashes of the newest blocks, to find where a reorg began
--   owed_ranges ── rewrites that are committed here but not yet announced to the dispatcher
--   template_… ── the columns of blocks, transactions, logs; dataset_… is a copy for one dataset version

create schema if not exists datasets;

create table if not exists datasets.followers (
    dataset_version uuid primary key,
    kind            text not null,
    task_id         uuid not null,
    attempt         int not null,
    holder          uuid not null,              -- new for every start: the fence of each write
    backend         int not null,               -- connection of the holder, which a newer attempt ends
    backend_start   timestamptz not null,
    chain_id        numeric not null,
    genesis         text,
    start_block     bigint not null,
    position        bigint not null,            -- last block stored
    cursor          bigint,                     -- announced to readers as complete up to here; never moves back
    taken_at        timestamptz not null default now()
) with (fillfactor = 70);

-- Keyed by the first output of the follower.
create table if not exists datasets.followed_blocks (
    dataset_version uuid not null,
    block_number    bigint not null,
    block_hash      text not null,
    primary key (dataset_version, block_number)
);

create table if not exists datasets.owed_ranges (
    owed_id         bigint generated always as identity,
    dataset_version uuid not null,
    range_start     bigint not null,
    range_end       bigint not null,
    primary key (dataset_version, owed_id)
);

create table if not exists datasets.template_blocks (
    block_number      bigint primary key,
    block_hash        text not null,
    parent_hash       text not null,
    block_timestamp   timestamptz not null,
    miner             text,
    gas_limit         numeric not null,
    gas_used          numeric not null,
    base_fee_per_gas  numeric,
    difficulty        numeric,
    size              bigint,
    extra_data        text,
    state_root        text,
    transactions_root text,
    receipts_root     text,
    transaction_count int not null
);

create table if not exists datasets.template_transactions (
    block_number             bigint not null,
    transaction_index        int not null,
    block_hash               text not null,
    block_timestamp          timestamptz not null,
    transaction_hash         text not null,
    from_address             text not null,
    to_address               text,              -- null for contract creation
    value                    numeric not null,
    nonce                    numeric not null,
    gas                      numeric not null,
    gas_price                numeric,
    max_fee_per_gas          numeric,
    max_priority_fee_per_gas numeric,
    type                     int,
    input                    text not null,
    primary key (block_number, transaction_index)
);

create table if not exists datasets.template_logs (
    block_number      bigint not null,
    log_index         int not null,
    block_hash        text not null,
    block_timestamp   timestamptz not null,
    transaction_hash  text not null,
    transaction_index int not null,
    address           text not null,
    topic0            text,
    topic1            text,
    topic2            text,
    topic3            text,
    data              text not null,
    primary key (block_number, log_index)
);

create or replace function datasets.create_table(version uuid, kind text) returns void language plpgsql as $$
begin
    execute format('create table if not exists datasets.%I (like datasets.%I including all)',
                   'dataset_' || replace(version::text, '-', ''), 'template_' || kind);
end $$;

create or replace function datasets.delete_from(version uuid, first_block bigint) returns void language plpgsql as $$
begin
    execute format('delete from datasets.%I where block_number >= $1',
                   'dataset_' || replace(version::text, '-', '')) using first_block;
end $$;
