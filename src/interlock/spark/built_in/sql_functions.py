"""Functions that a query of the operator `sql` may call: those whose value depends only on their arguments.

Excluded are functions that run code or read other data (`reflect`, `java_method`, `from_protobuf`, `xpath`), functions
that reveal facts about the process (`input_file_name`, `current_user`, `version`), and functions that differ from run
to run (`rand`, `uuid`, `now`): a retried task must return the same rows.
"""

from __future__ import annotations

from typing import Final

_CONDITIONS: Final = """
    coalesce if ifnull nanvl nullif nullifzero nvl nvl2 zeroifnull equal_null ilike isnan isnotnull isnull like
    regexp regexp_like rlike between
    cast try_cast typeof assert_true greatest least
"""
_NUMBERS: Final = """
    abs acos acosh asin asinh atan atan2 atanh bigint bin boolean bround cbrt ceil ceiling conv cos cosh cot csc
    degrees double e exp expm1 factorial float floor hex hypot int ln log log10 log1p log2 mod negative pi pmod
    positive pow power radians rint round sec sign signum sin sinh smallint sqrt tan tanh tinyint try_add
    try_divide try_mod try_multiply try_subtract unhex width_bucket bit_count bit_get getbit shiftleft shiftright
    shiftrightunsigned div
"""
_STRINGS: Final = """
    ascii base64 bit_length btrim char char_length character_length chr concat concat_ws contains decode elt
    encode endswith find_in_set format_number format_string initcap instr is_valid_utf8 lcase left len length
    levenshtein locate lower lpad ltrim make_valid_utf8 mask octet_length overlay position printf regexp_count
    regexp_extract regexp_extract_all regexp_instr regexp_replace regexp_substr repeat replace right rpad rtrim
    sentences soundex space split split_part startswith string substr substring substring_index to_binary to_char
    to_number to_varchar translate trim try_to_binary try_to_number ucase unbase64 upper validate_utf8
    try_validate_utf8 binary parse_url try_parse_url url_decode url_encode try_url_decode crc32 hash md5 sha sha1
    sha2 xxhash64
"""
_TIMES: Final = """
    add_months convert_timezone date date_add date_diff date_format date_from_unix_date date_part date_sub
    date_trunc dateadd datediff datepart day dayname dayofmonth dayofweek dayofyear extract from_unixtime
    from_utc_timestamp hour last_day make_date make_dt_interval make_interval make_timestamp make_timestamp_ltz
    make_timestamp_ntz make_ym_interval minute month monthname months_between next_day quarter second
    session_window timestamp timestamp_micros timestamp_millis timestamp_seconds timestampadd timestampdiff
    to_date to_timestamp to_timestamp_ltz to_timestamp_ntz to_utc_timestamp trunc try_to_timestamp try_to_date
    try_make_timestamp unix_date unix_micros unix_millis unix_seconds weekday weekofyear window window_time year
    to_unix_timestamp
"""
_COLLECTIONS: Final = """
    aggregate array array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_join array_max array_min array_position array_prepend array_remove array_repeat
    array_size array_sort array_union arrays_overlap arrays_zip cardinality element_at exists filter flatten
    forall get map map_concat map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys
    map_values map_zip_with named_struct reduce reverse sequence size slice sort_array str_to_map struct transform
    transform_keys transform_values try_element_at zip_with from_json get_json_object json_array_length
    json_object_keys json_tuple schema_of_json to_json from_csv to_csv is_variant_null parse_json try_parse_json
    try_variant_get variant_get to_variant_object
"""
_AGGREGATES: Final = """
    any any_value approx_count_distinct approx_percentile array_agg avg bit_and bit_or bit_xor bool_and bool_or
    collect_list collect_set corr count count_if covar_pop covar_samp every first first_value grouping grouping_id
    histogram_numeric hll_sketch_agg hll_sketch_estimate hll_union hll_union_agg kurtosis last last_value listagg
    max max_by mean median min min_by mode percentile percentile_approx percentile_cont percentile_disc product
    regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std
    stddev stddev_pop stddev_samp string_agg sum try_avg try_sum var_pop var_samp variance bitmap_and_agg
    bitmap_bit_position bitmap_bucket_number bitmap_construct_agg bitmap_count bitmap_or_agg
"""
_WINDOWS: Final = "cume_dist dense_rank lag lead nth_value ntile percent_rank rank row_number"
_GENERATORS: Final = "explode explode_outer inline inline_outer posexplode posexplode_outer stack"

TABLE_FUNCTIONS: Final = frozenset([*_GENERATORS.split(), "range"])
"""Functions that may be used as a relation."""

FUNCTIONS: Final = frozenset(
    " ".join([_CONDITIONS, _NUMBERS, _STRINGS, _TIMES, _COLLECTIONS, _AGGREGATES, _WINDOWS, _GENERATORS]).split()
)

VALUES_WITHOUT_PARENTHESES: Final = frozenset(
    [
        "current_catalog",
        "current_database",
        "current_date",
        "current_path",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "localtimestamp",
        "session_user",
        "user",
        "grouping__id",
    ]
)
"""Functions that Spark calls for a bare name if no column has that name."""
