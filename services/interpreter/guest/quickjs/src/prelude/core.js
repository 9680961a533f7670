// The part of the prelude every other part builds on.
//
// Each prelude file is a function of `native` (what src/natives.rs offers) and `inner` (what the files and the Rust side
// share). None of it is reachable from a script. A script may replace any built-in, so nothing here looks one up
// at run time: constructors are captured while the guest boots, methods are captured as plain functions.
(function (native, inner) {
  'use strict';
  const { defineProperty, getPrototypeOf } = Object;
  const { bind, call } = Function.prototype;

  // `unbind(Map.prototype.get)(map, key)` is `map.get(key)` that no later assignment can redirect.
  inner.unbind = bind.bind(call);
  inner.apply = Reflect.apply;

  // Globals can be replaced and shadowed by the script (`const print = …` is no error) and don't show in `for … in`.
  inner.define = (target, name, value) =>
    defineProperty(target, name, { __proto__: null, value, writable: true, configurable: true, enumerable: false });
  inner.global = (name, value) => inner.define(globalThis, name, value);

  const objectPrototype = Object.prototype;
  inner.isPlain = (value) => {
    if (typeof value !== 'object' || value === null) return false;
    const prototype = getPrototypeOf(value);
    return prototype === objectPrototype || prototype === null;
  };

  // A property that may be missing, a throwing getter, or of any type, as text.
  const { String: toText } = globalThis;
  inner.textOf = (object, name) => {
    try {
      const value = object[name];
      return value === undefined || value === null ? '' : toText(value);
    } catch {
      return '';
    }
  };

  // Who formats stacks is handed the functions on them, also those of the prelude, which reach the host with whatever they are given.
  // So no script formats stacks, and nothing on a stack tells its function.
  let site;
  Error.prepareStackTrace = (error, sites) => { site = sites[0]; };
  new Error();
  Error.prepareStackTrace = undefined;
  delete getPrototypeOf(site).getFunction;
  defineProperty(Error, 'prepareStackTrace', { __proto__: null, get: () => undefined, set() {}, configurable: false, enumerable: false });

  // Deeper stacks than the default ten frames, because the frames of the prelude are removed before anyone reads them.
  Error.stackTraceLimit = 24;
})
