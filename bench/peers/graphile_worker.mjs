// graphile-worker as a peer: accepts the verbs of program.py. Runs in the folder of its packages.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const { Logger, makeWorkerUtils, run } = createRequire(`${process.cwd()}/`)("graphile-worker");

const connectionString = process.argv[2];
const BATCH = 1000;
const IN_FLIGHT = 4;
// As documented for throughput, but with a local queue four times as long, which was faster on two cores.
// More concurrent jobs, a completion delay above zero, and a second process were not faster.
const preset = {
  worker: {
    connectionString,
    concurrentJobs: 24,
    maxPoolSize: 25,
    localQueue: { size: 2000 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  },
};

const say = (words) => process.stdout.write(`${JSON.stringify(words)}\n`);
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});
const utils = await makeWorkerUtils({ connectionString, maxPoolSize: IN_FLIGHT, logger });

let handled = 0;
let reported = 0;
const latencies = [];

function report() {
  if (reported === handled) return;
  reported = handled;
  say({ handled });
}

function noop(payload, { job }) {
  if (payload.timed) latencies.push(performance.timeOrigin + performance.now() - job.created_at.getTime());
  handled += 1;
  if (handled === 1) report();
}

async function create(count) {
  let made = 0;
  async function some() {
    while (made < count) {
      const size = Math.min(BATCH, count - made);
      made += size;
      await utils.addJobs(Array.from({ length: size }, () => ({ identifier: "noop", payload: { n: 1 } })));
    }
  }
  await Promise.all(Array.from({ length: IN_FLIGHT }, some));
}

async function trickle(count, rate) {
  const begun = performance.now();
  for (let n = 0; n < count; n += 1) {
    const due = begun + (n * 1000) / rate - performance.now();
    if (due > 0) await new Promise((resolve) => setTimeout(resolve, due));
    await utils.addJob("noop", { timed: true });
  }
}

let runner;
async function work() {
  setInterval(report, 10).unref();
  runner = await run({ preset, taskList: { noop }, logger, noHandleSignals: true });
}

const verbs = { install: () => utils.migrate(), create, trickle, work };
say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const [verb, ...numbers] = line.split(" ");
  await verbs[verb](...numbers.map(Number));
  say({ done: verb });
}
await runner?.stop();
report();
say({ latencies });
await utils.release();
