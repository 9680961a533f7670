// `print` and `console`: every call is one entry of the host's log.
(function (native, inner) {
  'use strict';
  const { display, inspect, unbind } = inner;
  const { log } = native;
  const now = Date.now;
  const NativeMap = Map;
  const mapGet = unbind(Map.prototype.get);
  const mapSet = unbind(Map.prototype.set);
  const slice = unbind(String.prototype.slice);
  const indexOf = unbind(String.prototype.indexOf);
  const repeat = unbind(String.prototype.repeat);
  const replaceAll = unbind(String.prototype.replaceAll);
  const toNumber = Number;
  const trunc = Math.trunc;
  const toText = String;

  // `console.log('%s has %d', …)`. Returns the text and the number of arguments it used.
  function substitute(args) {
    const format = args[0];
    let text = '';
    let used = 1;
    let from = 0;
    for (;;) {
      const at = indexOf(format, '%', from);
      if (at < 0 || at + 1 >= format.length) break;
      const directive = format[at + 1];
      text += slice(format, from, at);
      from = at + 2;
      if (directive === '%') text += '%';
      else if (used >= args.length || indexOf('sdifjoOc', directive) < 0) text += `%${directive}`;
      else {
        const value = args[used++];
        if (directive === 's' || directive === 'j') text += display(value);
        else if (directive === 'd' || directive === 'f') text += typeof value === 'bigint' ? `${value}n` : toText(toNumber(value));
        else if (directive === 'i') text += toText(trunc(toNumber(value)));
        else if (directive !== 'c') text += inspect(value);
      }
    }
    return [text + slice(format, from), used];
  }

  function line(args) {
    let text = '';
    let used = 0;
    if (args.length > 1 && typeof args[0] === 'string' && indexOf(args[0], '%') >= 0) [text, used] = substitute(args);
    for (let i = used; i < args.length; i++) text += i === 0 ? display(args[i]) : ` ${display(args[i])}`;
    return text;
  }

  let indent = '';
  const print = (...args) => {
    const text = args.length === 1 && typeof args[0] === 'string' ? args[0] : line(args);
    log(indent === '' ? text : indent + replaceAll(text, '\n', `\n${indent}`));
  };

  const counts = new NativeMap();
  const timers = new NativeMap();
  const elapsed = (name) => {
    const started = mapGet(timers, name);
    print(started === undefined ? `Timer '${name}' does not exist` : `${name}: ${now() - started}ms`);
  };
  const console = {
    log: print, info: print, warn: print, error: print, debug: print, table: print, dir: (value) => print(value),
    trace: (...args) => print(...args, `\n${inner.errorText(new Error('trace'))}`),
    assert: (condition, ...args) => { if (!condition) print('Assertion failed', ...args); },
    count: (name = 'default') => {
      const count = (mapGet(counts, name) ?? 0) + 1;
      mapSet(counts, name, count);
      print(`${name}: ${count}`);
    },
    countReset: (name = 'default') => { mapSet(counts, name, 0); },
    time: (name = 'default') => { mapSet(timers, name, now()); },
    timeLog: (name = 'default') => elapsed(name),
    timeEnd: (name = 'default') => elapsed(name),
    group: (...args) => { if (args.length > 0) print(...args); indent += '  '; },
    groupEnd: () => { indent = repeat('  ', indent.length < 2 ? 0 : indent.length / 2 - 1); },
  };
  inner.global('print', print);
  inner.global('console', console);
})
