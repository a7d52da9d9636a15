// Calls a bundle's handler with the event and writes its result to result.json.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const { pathToFileURL } = require("node:url");

const BAD_BUNDLE = 79;
const [bundle, name, attribute] = process.argv.slice(2);

function refuse(sentence) {
  process.stderr.write(`${sentence}\n`);
  process.exit(BAD_BUNDLE);
}

function file() {
  const endings = [".js", ".mjs", ".cjs", "/index.js"];
  const found = endings.map((ending) => path.join(bundle, name + ending)).find((each) => fs.existsSync(each));
  return found ?? refuse(`The bundle has no module '${name}'.`);
}

async function main() {
  const loaded = await import(pathToFileURL(file()).href);
  const handler = loaded[attribute] ?? loaded.default?.[attribute];
  if (typeof handler !== "function") refuse(`Module '${name}' has no function '${attribute}'.`);
  const result = await handler(JSON.parse(fs.readFileSync("event.json", "utf8")));
  if (result !== undefined) fs.writeFileSync("result.json", JSON.stringify(result));
}

main().then(
  () => process.exit(0),
  (error) => {
    process.stderr.write(`${error?.stack ?? error}\n`);
    const failure = { class: String(error?.name ?? "Error"), message: String(error?.message ?? error) };
    fs.writeFileSync("error.json", JSON.stringify(failure));
    process.exit(1);
  },
);
