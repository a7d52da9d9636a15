SELECT a % 2, a div 2, a / 2, -a, +a, ~a, a & 1, a | 1, a ^ 1, a << 1, a >> 1, a >>> 1, a || 'b', a <=> b, a <> b, a != b, NOT a, a == b FROM logs
SELECT a IS NULL, a IS NOT NULL, a IS TRUE, a IS NOT FALSE, a IS UNKNOWN, a IS NOT UNKNOWN, a BETWEEN 1 AND 2, a NOT BETWEEN 1 AND 2, a IN (1, 2), a NOT IN (1) FROM logs
SELECT a LIKE '%x%', a NOT LIKE 'x', a ILIKE 'x', a RLIKE '^a+$', a LIKE ANY ('a', 'b'), a LIKE ALL ('a%'), a NOT LIKE ALL ('a'), a LIKE 'a!%' ESCAPE '!' FROM logs
SELECT CASE a WHEN 1 THEN 'x' ELSE 'y' END, if(a, 1, 2), coalesce(a, 1), nullif(a, 1), CASE WHEN a THEN b END FROM logs
SELECT trim(a), trim(LEADING FROM a), trim(TRAILING 'x' FROM a), substring(a FROM 1 FOR 2), substring(a, 1, 2), position('a' IN b), overlay(a PLACING 'b' FROM 1 FOR 2) FROM logs
SELECT timestampadd(DAY, 1, t), timestampdiff(DAY, t, u), dateadd(DAY, 1, t), date_add(t, 1), extract(year FROM t), date_part('year', t), INTERVAL '1' DAY, INTERVAL '1-2' YEAR TO MONTH, TIMESTAMP '2020-01-01 00:00:00', make_date(1,2,3) FROM logs
SELECT first(a), last(a, true), any_value(a), first(a) IGNORE NULLS, count(DISTINCT a, b), count(*), sum(a), percentile_cont(0.5) WITHIN GROUP (ORDER BY a), listagg(a, ',') WITHIN GROUP (ORDER BY b), approx_count_distinct(a), max_by(a, b) FROM logs
SELECT a, b, sum(c) FROM logs GROUP BY GROUPING SETS ((a, b), (a), ())
SELECT a, b, grouping(a), grouping_id() FROM logs GROUP BY CUBE (a, b)
SELECT a, b FROM logs GROUP BY ROLLUP (a, b)
SELECT a, b FROM logs GROUP BY a, b WITH ROLLUP
SELECT a, lag(b, 1) OVER (PARTITION BY a ORDER BY b), sum(b) OVER w, rank() OVER (ORDER BY a DESC NULLS LAST), nth_value(a, 2) IGNORE NULLS OVER w FROM logs WINDOW w AS (PARTITION BY a ORDER BY b RANGE BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
SELECT * FROM logs QUALIFY row_number() OVER (PARTITION BY a ORDER BY b) = 1
SELECT * EXCEPT (a) FROM logs
SELECT logs.* FROM logs NATURAL JOIN blocks LEFT SEMI JOIN blocks x ON x.a = logs.a LEFT ANTI JOIN blocks y ON true CROSS JOIN blocks z FULL OUTER JOIN blocks w USING (a, b) RIGHT JOIN blocks q ON q.a = 1
SELECT * FROM logs INTERSECT SELECT * FROM blocks EXCEPT ALL SELECT * FROM logs MINUS SELECT 1 ORDER BY a LIMIT 10 OFFSET 5
SELECT * FROM logs UNION DISTINCT (SELECT * FROM blocks ORDER BY 1 LIMIT 1)
SELECT * FROM logs SORT BY a
SELECT * FROM logs DISTRIBUTE BY a SORT BY b
SELECT * FROM logs CLUSTER BY a
SELECT * FROM logs LATERAL VIEW OUTER explode(m) t AS k LATERAL VIEW posexplode(n) u AS p, q
SELECT explode(a), stack(2, 1, 2), inline(s) FROM logs
SELECT * FROM logs JOIN LATERAL (SELECT max(a) AS m FROM blocks WHERE blocks.b = logs.b) t
SELECT * FROM logs UNPIVOT (v FOR k IN (a, b AS x))
SELECT * FROM logs PIVOT (sum(a) AS s, max(b) AS m FOR (c, d) IN ((1, 2) AS x, (3, 4)))
SELECT struct(a, b).a, named_struct('x', 1).x, (a, b), array(1, 2)[0], map('a', 1)['a'], m.k, arr[1], (1 AS a, 2) FROM logs
SELECT transform(arr, (x, i) -> x + i), filter(arr, x -> x > 1), aggregate(arr, 0, (acc, x) -> acc + x, acc -> acc * 2), exists(arr, x -> x), zip_with(a, b, (x, y) -> x), map_filter(m, (k, v) -> v > 1), array_sort(arr, (l, r) -> l - r) FROM logs
SELECT aggregate(arr, '', (acc, x) -> concat(acc, ',', x)) FROM logs
SELECT cast(a AS array<struct<x: int, y: map<string, decimal(38,0)>>>), try_cast(a AS int), a::date, from_json(a, 'x int'), to_json(b), get_json_object(a, '$.b[0].c'), parse_json(a) FROM logs
SELECT 1, 1L, 1S, 1Y, 1.5, 1e3, 1.5BD, 2.0f, 1d, true, null, 'a' 'b', X'1F', r'a\\d', 12345678901234567890123456789012345678 FROM logs
SELECT regexp_replace(a, '[0-9]+', '#'), regexp_extract(a, '^0x([0-9a-f]+)$', 1), split(a, ','), regexp_like(a, 'x'), rlike(a, 'y'), str_to_map(a, ',', ':'), replace(a, 'x', 'yy') FROM logs
SELECT repeat(a, 3), lpad(a, 64, '0'), space(3), sequence(1, 10), sequence(DATE'2020-01-01', DATE'2020-12-31', INTERVAL 1 DAY), format_string('%05d %s', a, b), format_number(a, 2), array_repeat(0, 5), explode(sequence(1, 1000)) FROM logs
SELECT window(t, '1 hour').start, count(*) FROM logs GROUP BY window(t, '1 hour')
SELECT a FROM logs WHERE (a, b) IN (SELECT a, b FROM blocks)
SELECT a FROM logs WHERE a >= (SELECT avg(a) FROM blocks b WHERE b.x = logs.x) AND NOT EXISTS (SELECT * FROM blocks)
WITH t AS (WITH u AS (SELECT * FROM logs) SELECT * FROM u), v(x, y) AS (SELECT 1, 2) SELECT * FROM t, v
SELECT DISTINCT a, b AS c FROM (SELECT * FROM logs) WHERE a HAVING b
SELECT * FROM VALUES (1, 'a', array(1), date'2020-01-01'), (2, NULL, array(), NULL) AS t(a, b, c, d)
SELECT * FROM VALUES (1), (1 + 1), (abs(-3))
SELECT all a FROM logs ORDER BY ALL
SELECT a AS `select`, b `from` FROM logs AS `where`
TABLE logs
SELECT hash(a), md5(a), sha2(a, 256), hex(a), unhex(a), conv(a, 16, 10), try_add(a, 1), typeof(a), percentile_approx(a, 0.5, 100), hll_sketch_agg(a), array_agg(a), mode(a), collect_set(a) FROM logs
SELECT count_if(a > 1), bool_or(b), every(b), some(b), max(a) FILTER (WHERE b), try_sum(a), string_agg(a, ','), stddev(a), corr(a, b) FROM logs
SELECT date_trunc('day', t), trunc(t, 'MM'), to_timestamp(a, 'yyyy'), from_unixtime(a), unix_timestamp FROM logs
SELECT a.b.c, a['b'], a.`b c`, logs.a.b FROM logs
SELECT (SELECT 1), (SELECT max(a) FROM blocks) + 1 FROM logs
SELECT 1 FROM logs a JOIN (blocks b JOIN logs c ON b.x = c.x) ON a.x = b.x
SELECT ceil(a, 2), floor(a), left(a, 1), right(a, 1), char(65), mod(a, 2) FROM logs
FROM logs SELECT a WHERE b
SELECT * FROM range(0, 10, 2) AS r(i), explode(array(1, 2)) AS t(x)
SELECT a, b FROM logs WHERE a IS NOT DISTINCT FROM b
