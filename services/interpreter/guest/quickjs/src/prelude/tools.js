// Tools and timers: everything that leaves the sandbox.
//
// Every tool is a global function and a member of `tools`. The tools are declared when the guest is
// built (../tools.json); the host declares others when a run starts (`configure`).
//   read_file(path)          returns the result and blocks the script (immediate tools)
//   tools.read_file(path)    returns a promise; such calls run concurrently on the host
// A tool named `secrets.get` is a member of the global object `secrets`, and of `tools.secrets`; one
// named `tools.search` is a member of `tools`.
//
// Arguments are passed by position, by name, or both: read_file('a.txt', 1, 20), read_file({ path:
// 'a.txt', start_line: 1 }), read_file('a.txt', { start_line: 1 }). The rule: a plain object as the
// last argument names arguments, unless the tool takes an object in that position. If the first
// parameter takes an object, a single object names arguments only if its keys are all parameters of
// the tool and the first parameter is among them.
(function (native, inner) {
  'use strict';
  const { apply, unbind, isPlain } = inner;
  const { parse, stringify } = JSON;
  const { keys, hasOwn, freeze, setPrototypeOf } = Object;
  const NativeProxy = Proxy;
  const indexOf = unbind(String.prototype.indexOf);
  const slice = unbind(String.prototype.slice);
  const NativeMap = Map;
  const mapGet = unbind(Map.prototype.get);
  const mapSet = unbind(Map.prototype.set);
  const mapDelete = unbind(Map.prototype.delete);
  const mapSize = unbind(Object.getOwnPropertyDescriptor(Map.prototype, 'size').get);
  const arrayIncludes = unbind(Array.prototype.includes);
  const join = unbind(Array.prototype.join);
  const NativePromise = Promise;
  const errors = { __proto__: null, Error, TypeError, RangeError, SyntaxError };
  const NativeError = Error;
  const NativeTypeError = TypeError;

  const MAX_RUNNING = 64; // Concurrent calls on the host; further ones wait here, in order.
  const MAX_TIMERS = 1000; // Timers alive at once.

  // --- Arguments -------------------------------------------------------------------------------------------------------

  // Whether the object at `position` is that parameter's value (and not a set of named arguments).
  function isValue(tool, position, count, object) {
    if (position >= tool.parameters.length || !arrayIncludes(tool.objects, position)) return false;
    if (position > 0 || count > 1) return true;
    const names = keys(object);
    for (let i = 0; i < names.length; i++) if (!arrayIncludes(tool.parameters, names[i])) return true;
    return !hasOwn(object, tool.parameters[0]);
  }

  function pack(tool, args) {
    let count = args.length;
    while (count > 0 && args[count - 1] === undefined) count--;
    if (count === 0) return '{}';
    const { name, parameters } = tool;
    let named = null;
    if (count > 0 && isPlain(args[count - 1]) && !isValue(tool, count - 1, count, args[count - 1])) named = args[--count];
    if (count > parameters.length) {
      throw new NativeTypeError(`${name} takes at most ${parameters.length} arguments (${join(parameters, ', ')}), but ${count} were given`);
    }
    if (count === 0) return stringify({ __proto__: null, ...named });
    const packed = { __proto__: null };
    for (let i = 0; i < count; i++) if (args[i] !== undefined) packed[parameters[i]] = args[i];
    if (named !== null) {
      const names = keys(named);
      for (let i = 0; i < names.length; i++) {
        if (hasOwn(packed, names[i])) throw new NativeTypeError(`${name}: ${names[i]} is given twice, by position and by name`);
        packed[names[i]] = named[names[i]];
      }
    }
    return stringify(packed);
  }

  // --- Calls -----------------------------------------------------------------------------------------------------------

  // An Error with that name. `site` is an Error created at the call, so that the stack has the
  // script's line of the call. It is undefined if the script is blocked in the call.
  function failed({ name, message, code, details }, site) {
    const error = site ?? new (errors[name] ?? NativeError)(message);
    inner.define(error, 'message', message);
    inner.define(error, 'name', name);
    if (code !== undefined && code !== null) inner.define(error, 'code', code);
    if (details !== undefined && details !== null) inner.define(error, 'details', details);
    return error;
  }

  // The host's error (JSON: {name, message, code?, details?}) as an Error.
  const failure = (text, site) => failed(parse(text), site);
  inner.failure = (text) => failure(text);

  const { call: callHost, failure: lastFailure } = native;

  function callNow(tool, args) {
    const reply = callHost(tool.id, pack(tool, args));
    if (reply === undefined) throw failure(lastFailure());
    return reply;
  }

  const pending = new NativeMap(); // number → call, for every call the host is working on
  let waiting = null; // calls that wait for a slot: a linked list, oldest first
  let lastWaiting = null;
  let running = 0;

  function begin(call) {
    running++;
    mapSet(pending, call.number, call);
    native.start(call.number, call.tool, call.args);
  }

  function callLater(tool, args) {
    return new NativePromise((resolve, reject) => {
      const packed = pack(tool, args);
      const call = { __proto__: null, number: native.number(), tool: tool.id, args: packed, resolve, reject, site: new NativeError(), next: null, timer: null };
      if (running < MAX_RUNNING) begin(call);
      else if (waiting === null) waiting = lastWaiting = call;
      else lastWaiting = lastWaiting.next = call;
    });
  }

  // Settles a call that has ended on the host, with its result or its error as JSON. The Rust side
  // calls this between two jobs of the script.
  inner.settle = (number, succeeded, reply) => {
    const call = mapGet(pending, number);
    if (call === undefined) return;
    mapDelete(pending, number);
    if (call.timer !== null) return fire(call.timer);
    running--;
    if (waiting !== null) {
      const next = waiting;
      waiting = next.next;
      begin(next);
    }
    if (succeeded) call.resolve(reply);
    else call.reject(failure(reply, call.site));
  };

  // The number of calls that never got a slot, for the note about calls that were cut off.
  inner.waiting = () => {
    let count = 0;
    for (let call = waiting; call !== null; call = call.next) count++;
    return count;
  };

  // The prototype of an object of tools: a missing member is a function that throws UnknownTool.
  // Names that are looked up implicitly (`await tools`, `JSON.stringify(tools)`) are undefined.
  const quiet = { __proto__: null, then: true, toJSON: true, constructor: true, toString: true, valueOf: true };
  const unknown = (prefix) => new NativeProxy({ __proto__: null }, {
    __proto__: null,
    has: () => false,
    get: (target, name) => {
      if (typeof name !== 'string' || quiet[name]) return undefined;
      return () => {
        const error = new NativeError(inner.unknownTool(prefix + name));
        inner.define(error, 'name', 'UnknownTool');
        throw error;
      };
    },
  });
  const unknownTool = unknown('');

  let globals = []; // The names that `configure` added to the global object.

  // `text` is [[name, immediate, [parameter…], [positions of parameters that take an object…],
  // [alias…]]…].
  inner.configure = (text) => {
    const table = parse(text);
    for (let i = 0; i < globals.length; i++) delete globalThis[globals[i]];
    globals = ['tools'];
    const tools = { __proto__: null };
    const spaces = { __proto__: null }; // The global objects of tools with dotted names.
    const names = [];
    for (let i = 0; i < table.length; i++) {
      const row = table[i];
      const tool = { __proto__: null, id: native.tool(row[0]), name: row[0], parameters: row[2], objects: row[3] };
      const later = { [tool.name](...args) { return callLater(tool, args); } }[tool.name];
      const now = row[1] ? { [tool.name](...args) { return callNow(tool, args); } }[tool.name] : later;
      for (let j = -1; j < row[4].length; j++) {
        const name = j < 0 ? tool.name : row[4][j];
        names[names.length] = name;
        const dot = indexOf(name, '.');
        if (dot < 0) {
          tools[name] = later;
          inner.global(name, now);
          globals[globals.length] = name;
          continue;
        }
        const space = slice(name, 0, dot);
        const member = slice(name, dot + 1);
        if (space === 'tools') {
          tools[member] = later;
          continue;
        }
        if (spaces[space] === undefined) {
          spaces[space] = { __proto__: null };
          tools[space] = { __proto__: null };
        }
        spaces[space][member] = now;
        tools[space][member] = later;
      }
    }
    for (const space in spaces) {
      const missing = unknown(`${space}.`);
      freeze(setPrototypeOf(tools[space], missing));
      inner.global(space, freeze(setPrototypeOf(spaces[space], missing)));
      globals[globals.length] = space;
    }
    inner.toolNames = names;
    inner.global('tools', freeze(setPrototypeOf(tools, unknownTool)));
  };

  // --- Timers ----------------------------------------------------------------------------------------------------------

  const SLEEP = native.tool('__sleep');
  const timers = new NativeMap(); // id → timer
  const trunc = Math.trunc;

  function arm(timer) {
    const number = native.number();
    timer.number = number;
    mapSet(pending, number, { __proto__: null, number, timer });
    native.start(number, SLEEP, `{"ms":${timer.delay}}`);
  }

  function schedule(callback, delay, args, repeats) {
    if (typeof callback !== 'function') throw new NativeTypeError('the callback of a timer must be a function');
    if (mapSize(timers) >= MAX_TIMERS) {
      const message = `A script has at most ${MAX_TIMERS} timers at the same time: clear some, or wait for the first ones before setting more.`;
      throw failed({ __proto__: null, name: 'TimerLimitExceeded', message });
    }
    delay = trunc(+delay);
    if (!(delay >= (repeats ? 1 : 0))) delay = repeats ? 1 : 0;
    if (delay > 2147483647) delay = 2147483647;
    const timer = { __proto__: null, id: 0, number: 0, callback, delay, args, repeats };
    arm(timer);
    timer.id = timer.number;
    mapSet(timers, timer.id, timer);
    return timer.id;
  }

  function fire(timer) {
    if (mapGet(timers, timer.id) !== timer) return;
    if (!timer.repeats) mapDelete(timers, timer.id);
    try {
      apply(timer.callback, undefined, timer.args);
    } catch (error) {
      inner.unhandledError(error);
    }
    if (timer.repeats && mapGet(timers, timer.id) === timer) arm(timer);
  }

  function clear(id) {
    const timer = mapGet(timers, id);
    if (timer === undefined) return;
    mapDelete(timers, id);
    mapDelete(pending, timer.number);
    native.cancel(timer.number);
  }

  inner.global('setTimeout', function setTimeout(callback, delay = 0, ...args) { return schedule(callback, delay, args, false); });
  inner.global('setInterval', function setInterval(callback, delay = 0, ...args) { return schedule(callback, delay, args, true); });
  inner.global('clearTimeout', clear);
  inner.global('clearInterval', clear);
  inner.global('setImmediate', function setImmediate(callback, ...args) { return schedule(callback, 0, args, false); });
  inner.global('clearImmediate', clear);

  // --- Unhandled errors --------------------------------------------------------------------

  const MAX_UNHANDLED = 20; // Maximum number of rejections kept for the notes.
  const unhandled = new NativeMap(); // promise (or, for a timer, a token) → reason
  const mapForEach = unbind(Map.prototype.forEach);

  inner.rejection = (promise, reason, handled) => {
    if (handled) mapDelete(unhandled, promise);
    else if (mapSize(unhandled) < MAX_UNHANDLED) mapSet(unhandled, promise, reason);
  };
  inner.unhandledError = (error) => {
    native.note();
    inner.rejection({}, error, false);
  };

  // One text per unhandled error, except the one that ends the run.
  inner.unhandled = (ended, thrown) => {
    const texts = [];
    mapForEach(unhandled, (reason) => {
      if (ended && reason === thrown) return;
      let text;
      try {
        text = reason instanceof NativeError ? inner.errorText(reason) : inner.display(reason);
      } catch {
        text = '(an error that cannot be shown)';
      }
      texts[texts.length] = text;
    });
    return texts;
  };
})
