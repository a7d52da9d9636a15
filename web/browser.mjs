// Unpacks the Chromium of the tests from its npm package: node browser.mjs FOLDER
import { chmod, mkdir } from "node:fs/promises";
import { createReadStream, createWriteStream } from "node:fs";
import { execFileSync } from "node:child_process";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const from = new URL("node_modules/@sparticuz/chromium/bin/", import.meta.url).pathname;
const folder = process.argv[2];

async function unpack(name) {
  const file = `${folder}/${name}`;
  await pipeline(createReadStream(`${from}${name}.br`), createBrotliDecompress(), createWriteStream(file));
  return file;
}

await mkdir(folder, { recursive: true });
// Its libraries, for machines that lack them, and a font, since containers often have none.
for (const archive of ["al2023.tar", "fonts.tar", "swiftshader.tar"]) execFileSync("tar", ["xf", await unpack(archive), "-C", folder]);
await chmod(await unpack("chromium"), 0o755);
