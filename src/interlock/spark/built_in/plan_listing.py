"""Converts Spark's unresolved plan of a statement to plain Python nodes.

Spark only parses the text. It analyses nothing, so it accesses no catalog, file or host. The plan is a graph of Scala
case classes. The listing contains every constructor argument of every node (`productIterator`), not only the nodes that
Spark calls children. It therefore includes subqueries, CTE definitions, window definitions and options.

Reading the plan field by field through py4j would cost a round trip per field (0.1 to 0.3 s for a short statement).
Instead, a class that Janino compiles once per driver creates the listing inside the JVM. Spark itself depends on Janino
for its generated code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import msgspec
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

MAX_NODES: Final = 100_000
MAX_DEPTH: Final = 400
"""Levels of the listing. A nested expression takes one to three levels. Spark's own recursion overflows at about three
times this depth."""
MAX_BRACKETS: Final = 100
"""Levels of (, [ and CASE in the text."""
MAX_TYPES: Final = 60
"""Number of `array<`, `map<` and `struct<` in the text. Spark's parser takes 4 s for 300 nested types, and minutes for
10,000."""

MAX_COMMENTS: Final = 5
"""Levels of `/*`. The time of Spark's lexer doubles with each level: 300 levels never end."""
_TOO_DEEP: Final = "it is too long or nested too deeply: split it into several jobs"

_SPARK: Final = "org.apache.spark.sql.catalyst."

_SOURCE: Final = """
import java.util.ArrayDeque;
import java.util.ArrayList;
import org.antlr.v4.runtime.CharStreams;
import org.antlr.v4.runtime.Token;
import org.apache.spark.sql.catalyst.parser.SqlBaseLexer;
import org.apache.spark.sql.catalyst.parser.UpperCaseCharStream;
import org.apache.spark.sql.catalyst.trees.Origin;
import org.apache.spark.sql.catalyst.trees.TreeNode;

public final class PlanListing {
    /**
     * Returns the deepest nesting of brackets, and the number of nested types, of CUBE( within GROUPING SETS and of
     * IDENTIFIER(, from the tokens of Spark's own lexer.
     */
    public String nesting(String text) {
        SqlBaseLexer lexer = new SqlBaseLexer(new UpperCaseCharStream(CharStreams.fromString(text)));
        lexer.removeErrorListeners();
        int depth = 0, deepest = 0, types = 0, sets = 0, cubes = 0, names = 0;
        String before = "";
        for (Token token = lexer.nextToken(); token.getType() != Token.EOF; token = lexer.nextToken()) {
            if (token.getChannel() != Token.DEFAULT_CHANNEL) continue;
            String word = token.getText().toUpperCase(java.util.Locale.ROOT);
            if (word.equals("(") || word.equals("[") || word.equals("CASE")) depth++;
            else if (word.equals(")") || word.equals("]") || word.equals("END")) depth--;
            else if (word.startsWith("<") && before.matches("ARRAY|MAP|STRUCT")) types++;
            if (word.equals("(") && before.equals("SETS") && sets == 0) sets = depth;
            else if (word.equals("(") && before.equals("CUBE") && sets > 0) cubes++;
            else if (word.equals("(") && before.equals("IDENTIFIER")) names++;
            else if (depth < sets) sets = 0;
            deepest = Math.max(deepest, depth);
            before = word;
        }
        return deepest + " " + types + " " + cubes + " " + names;
    }

    /** Lists [depth, class, text, place] of each value in tree order; returns "" for a tree that is too large. */
    public String list(Object root, int maxNodes, int maxDepth) throws Exception {
        ArrayList out = new ArrayList();
        ArrayDeque todo = new ArrayDeque();
        todo.push(new Object[] {root, Integer.valueOf(0)});
        while (!todo.isEmpty()) {
            Object[] next = (Object[]) todo.pop();
            int depth = ((Integer) next[1]).intValue();
            if (out.size() >= maxNodes || depth > maxDepth) return "";
            ArrayList below = new ArrayList();
            out.add(described(next[0], depth, below));
            for (int i = below.size() - 1; i >= 0; i--)
                todo.push(new Object[] {below.get(i), Integer.valueOf(depth + 1)});
        }
        return new com.fasterxml.jackson.databind.ObjectMapper().writeValueAsString(out);
    }

    private static Object[] described(Object value, int depth, ArrayList below) {
        String name = value == null ? "null" : value.getClass().getName();
        String text = null;
        if (value instanceof org.apache.spark.sql.types.DataType) {
            name = "type";
            text = ((org.apache.spark.sql.types.DataType) value).catalogString();
        } else if (value instanceof scala.collection.Iterable) {
            name = "seq";
            scala.collection.Iterator each = ((scala.collection.Iterable) value).iterator();
            while (each.hasNext()) below.add(each.next());
        } else if (value instanceof java.util.Map) {
            name = "map";
            text = String.valueOf(((java.util.Map) value).size());
        } else if (value instanceof scala.Product) {
            scala.Product product = (scala.Product) value;
            for (int i = 0; i < product.productArity(); i++) below.add(product.productElement(i));
        } else if (value instanceof CharSequence || value instanceof Number || value instanceof Boolean
                || value instanceof Character || value instanceof org.apache.spark.unsafe.types.UTF8String
                || value instanceof org.apache.spark.sql.types.Decimal) {
            text = value.toString();
        } else if (value instanceof byte[]) {
            text = java.util.HexFormat.of().formatHex((byte[]) value);
        }
        String place = value instanceof TreeNode ? place((TreeNode) value) : null;
        return new Object[] {Integer.valueOf(depth), name, text, place};
    }

    private static String place(TreeNode node) {
        Origin origin = node.origin();
        if (origin.line().isEmpty() || origin.startPosition().isEmpty()) return null;
        return "line " + origin.line().get() + ", column " + (((Integer) origin.startPosition().get()).intValue() + 1);
    }
}
"""


class TooComplex(Exception):
    """Raised for a statement that is too expensive to be parsed or checked."""


@dataclass(slots=True)
class Node:
    kind: str
    """Name of the class, without the prefix of Catalyst's package. Sequences are `seq`, Java maps `map`, data types
    `type`."""
    text: str | None
    """The value of a string, number, binary or type; the number of entries of a Java map."""
    place: str | None
    fields: list[Node] = field(default_factory=list)

    def names(self) -> list[str]:
        """Returns the parts of a name. The node must be a sequence of strings."""
        return [one.text or "" for one in self.fields]


def parse(spark: SparkSession, text: str) -> tuple[Any, Node]:
    """Returns the unresolved plan, which stays in the JVM, and its listing. Raises ParseException or TooComplex."""
    session: Any = spark
    if _comment_depth(text) > MAX_COMMENTS:
        raise TooComplex(f"comments may be nested at most {MAX_COMMENTS} deep; /* within a string counts")
    listing = _compiled(session._jvm)
    try:
        deepest, types, cubes, names = map(int, listing.nesting(text).split())
        if deepest > MAX_BRACKETS or types > MAX_TYPES:
            raise TooComplex(_TOO_DEEP)
        if cubes > 0:
            raise TooComplex(
                "CUBE within GROUPING SETS is not allowed, because Spark's parser expands it: list the sets"
            )
        if names > 0:
            raise TooComplex(
                "IDENTIFIER(…) is not allowed, because Spark's parser parses its text: write the name itself"
            )
        plan = session._jsparkSession.sessionState().sqlParser().parsePlan(text)
        listed = listing.list(plan, MAX_NODES, MAX_DEPTH)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() == "java.lang.StackOverflowError":
            raise TooComplex(_TOO_DEEP) from None
        raise
    if not listed:
        raise TooComplex(_TOO_DEEP)
    return plan, _tree(msgspec.json.decode(listed, type=list[tuple[int, str, str | None, str | None]]))


def _comment_depth(text: str) -> int:
    """Returns the deepest nesting of comments. Strings are not told apart, so the depth may be overestimated."""
    depth = deepest = 0
    for mark in re.findall(r"/\*|\*/", text):
        depth = depth + 1 if mark == "/*" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


@cache
def _compiled(jvm: Any) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(_SOURCE)
    return compiler.getClassLoader().loadClass("PlanListing").newInstance()


def _tree(rows: list[tuple[int, str, str | None, str | None]]) -> Node:
    path: list[Node] = []
    for depth, kind, text, place in rows:
        node = Node(kind.removeprefix(_SPARK), text, place)
        del path[depth:]
        if path:
            path[-1].fields.append(node)
        path.append(node)
    return path[0]
