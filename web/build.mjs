// Bundles the dashboard into src/interlock/web/static. Every file below assets/ has a content hash in its name, so that
// the gateway can serve it as immutable.
import { build } from "esbuild";
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename } from "node:path";
import { gzipSync } from "node:zlib";

const out = new URL("../src/interlock/web/static/", import.meta.url).pathname;
const FIRST_LOAD_LIMIT = 150_000;

// The layout of graphs runs in a web worker, which is a file of its own.
const elkWorker = {
  name: "elk-worker",
  setup(bundle) {
    bundle.onLoad({ filter: /elk-worker\.min\.js$/ }, async ({ path }) => ({
      contents: await readFile(path),
      loader: "file",
    }));
  },
};

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
const { metafile } = await build({
  absWorkingDir: new URL(".", import.meta.url).pathname,
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  entryNames: "assets/[name]-[hash]",
  chunkNames: "assets/[name]-[hash]",
  assetNames: "assets/[name]-[hash]",
  publicPath: "/ui/",
  bundle: true,
  splitting: true,
  format: "esm",
  target: ["es2022", "chrome111", "firefox114", "safari16.4"],
  minify: true,
  metafile: true,
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".woff2": "file", ".svg": "file" },
  plugins: [elkWorker],
  legalComments: "none",
  logLevel: "warning",
});

const outputs = Object.entries(metafile.outputs).map(([path, output]) => ({ name: basename(path), ...output }));
const named = (pattern) => outputs.find(({ name }) => pattern.test(name)).name;
const script = outputs.find(({ entryPoint }) => entryPoint === "src/main.tsx");
const eager = script.imports.filter(({ kind }) => kind === "import-statement").map(({ path }) => basename(path));
const names = {
  SCRIPT: script.name,
  STYLE: named(/^app-.*\.css$/),
  FONT: named(/^inter-latin-wght.*\.woff2$/),
  ICON: named(/^icon-.*\.svg$/),
};

let page = await readFile(new URL("src/index.html", import.meta.url), "utf8");
for (const [key, name] of Object.entries(names)) page = page.replaceAll(`{{${key}}}`, name);
await writeFile(`${out}index.html`, page);

let total = gzipSync(page).length;
for (const name of [...Object.values(names), ...eager]) total += gzipSync(await readFile(`${out}assets/${name}`)).length;
console.log(`Dashboard: ${outputs.length} files, first load ${(total / 1000).toFixed(0)} KB compressed`);
if (total > FIRST_LOAD_LIMIT) throw new Error(`The first load exceeds ${FIRST_LOAD_LIMIT / 1000} KB: load a page or a library lazily`);
