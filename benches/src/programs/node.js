// The peer: Node's `vm`, in a process of its own. Takes what to measure as JSON, prints one JSON object of nanoseconds.
const vm = require('node:vm');
const timed = (work) => {
  const began = process.hrtime.bigint();
  work();
  return Number(process.hrtime.bigint() - began);
};
const repeated = (count, work) => Array.from({ length: count }, work);
const plan = JSON.parse(process.argv[1]);

const fresh = repeated(250, () => timed(() => vm.runInNewContext('1+1'))).slice(50);

// As in native QuickJS: through JSON, into a function of this process, which a script could otherwise take hold of this process by.
const native = (text) => (JSON.parse(text) === null ? '' : 'null');
const calls = plan.bodies.map((body) => repeated(plan.callRuns, () => {
  const context = vm.createContext({ native });
  vm.runInContext('globalThis.noop = (value) => JSON.parse(native(JSON.stringify([value])));', context);
  const loop = (body) => timed(() => vm.runInContext(`for (let i = 0; i < ${plan.calls}; i++) ${body};`, context));
  return Math.max(0, loop(body) - loop('i'));
}));

const programs = plan.programs.map((source) => repeated(plan.programRuns, () => {
  const context = vm.createContext();
  return timed(() => vm.runInContext(source, context));
}));
console.log(JSON.stringify({ fresh, calls, programs }));
