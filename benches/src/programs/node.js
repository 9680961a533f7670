// The peer: Node's `vm`, in a process of its own. Takes the programs' paths, prints one JSON object of nanoseconds.
const vm = require('node:vm');
const fs = require('node:fs');
const timed = (work) => {
  const began = process.hrtime.bigint();
  work();
  return Number(process.hrtime.bigint() - began);
};
const fresh = [];
for (let i = 0; i < 250; i++) fresh.push(timed(() => vm.runInNewContext('1+1')));
const programs = {};
for (const path of process.argv.slice(1)) {
  const source = fs.readFileSync(path, 'utf8');
  const times = [];
  for (let i = 0; i < 3; i++) {
    const context = vm.createContext();
    times.push(timed(() => vm.runInContext(source, context)));
  }
  programs[path] = Math.min(...times);
}
console.log(JSON.stringify({ fresh: fresh.slice(50), programs }));
