// The base of all other parts of the prelude.
//
// Each prelude file is a function of `native` (the functions of src/natives.rs) and `inner` (shared
// by the files and the Rust side). No script can reach either. A script may replace any built-in,
// so nothing here looks one up at run time: constructors are captured while the guest boots,
// methods are captured as plain functions.
(function (native, inner) {
  'use strict';
  const { defineProperty, getPrototypeOf } = Object;
  const { bind, call } = Function.prototype;

  // `unbind(Map.prototype.get)(map, key)` is `map.get(key)` that no later assignment can redirect.
  inner.unbind = bind.bind(call);
  inner.apply = Reflect.apply;

  // Globals can be replaced and shadowed by the script (`const print = …` is no error) and do not
  // appear in `for … in`.
  inner.define = (target, name, value) =>
    defineProperty(target, name, { __proto__: null, value, writable: true, configurable: true, enumerable: false });
  inner.global = (name, value) => inner.define(globalThis, name, value);

  const objectPrototype = Object.prototype;
  inner.isPlain = (value) => {
    if (typeof value !== 'object' || value === null) return false;
    const prototype = getPrototypeOf(value);
    return prototype === objectPrototype || prototype === null;
  };

  // The text of a property that may be missing, of any type, or a throwing getter.
  const { String: toText } = globalThis;
  inner.textOf = (object, name) => {
    try {
      const value = object[name];
      return value === undefined || value === null ? '' : toText(value);
    } catch {
      return '';
    }
  };

  // A stack formatter gets the functions on the stack, including the prelude's, which pass their
  // arguments to the host. So scripts cannot format stacks, and stack frames do not expose their
  // function.
  let site;
  Error.prepareStackTrace = (error, sites) => { site = sites[0]; };
  new Error();
  Error.prepareStackTrace = undefined;
  delete getPrototypeOf(site).getFunction;
  defineProperty(Error, 'prepareStackTrace', { __proto__: null, get: () => undefined, set() {}, configurable: false, enumerable: false });

  // More than the default ten frames, because the prelude's frames are removed before a stack is
  // shown.
  Error.stackTraceLimit = 24;
})
