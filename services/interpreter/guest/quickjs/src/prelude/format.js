// Turns values into text: for `print`, for the script's result and for errors.
//
// A value that JSON represents faithfully is shown as JSON, because models read and write it best.
// Anything else (Map, Set, BigInt, functions, cycles, undefined inside arrays, errors …) is shown
// in the notation of the usual consoles. Formatting never throws because of the value, and is
// bounded in depth, width and length.
(function (native, inner) {
  'use strict';
  const { apply, unbind, isPlain, textOf } = inner;
  const { stringify } = JSON;
  const { isArray } = Array;
  const { getPrototypeOf, getOwnPropertyDescriptor, keys } = Object;
  const toText = String;
  const isNaNumber = Number.isFinite;
  const mapForEach = unbind(Map.prototype.forEach);
  const setForEach = unbind(Set.prototype.forEach);
  const mapSize = unbind(getOwnPropertyDescriptor(Map.prototype, 'size').get);
  const setSize = unbind(getOwnPropertyDescriptor(Set.prototype, 'size').get);
  const dateValue = unbind(Date.prototype.getTime);
  const dateText = unbind(Date.prototype.toISOString);
  const regexpText = unbind(RegExp.prototype.toString);
  const symbolText = unbind(Symbol.prototype.toString);
  const functionText = unbind(Function.prototype.toString);
  const typedArrayTag = unbind(getOwnPropertyDescriptor(getPrototypeOf(Uint8Array.prototype), Symbol.toStringTag).get);
  const isView = ArrayBuffer.isView;
  const slice = unbind(String.prototype.slice);
  const split = unbind(String.prototype.split);
  const startsWith = unbind(String.prototype.startsWith);
  const includes = unbind(String.prototype.includes);
  const join = unbind(Array.prototype.join);
  const isError = Error.isError ?? ((value) => value instanceof Error);
  const NativeSet = Set;
  const setAdd = unbind(Set.prototype.add);
  const setHas = unbind(Set.prototype.has);
  const setDelete = unbind(Set.prototype.delete);
  const NativePromise = Promise;
  const NativeWeakMap = WeakMap;
  const NativeWeakSet = WeakSet;

  const MAX_DEPTH = 6; // Levels of nesting shown by `inspect`.
  const MAX_ITEMS = 200; // Entries of one array, object, map or set shown by `inspect`.
  const MAX_ERROR_TEXT = 16384; // Characters of one error's message, and of its stack, that are reported.

  // --- Faithful JSON ---------------------------------------------------------------------------------------------------

  // Whether JSON represents the value faithfully. `open` holds the objects being visited, to find
  // cycles.
  function isJson(value, open, depth) {
    switch (typeof value) {
      case 'string':
      case 'boolean':
        return true;
      case 'number':
        return isNaNumber(value);
      case 'object':
        break;
      default:
        return false;
    }
    if (value === null) return true;
    if (depth > 100 || setHas(open, value)) return false;
    if (isArray(value)) {
      setAdd(open, value);
      for (let i = 0; i < value.length; i++) if (!isJson(value[i], open, depth + 1)) return false;
      setDelete(open, value);
      return true;
    }
    if (typeof value.toJSON === 'function') return !(value instanceof Date) || isNaNumber(dateValue(value));
    if (!isPlain(value) && isExotic(value)) return false;
    setAdd(open, value);
    const names = keys(value);
    for (let i = 0; i < names.length; i++) {
      const item = value[names[i]];
      if (item !== undefined && !isJson(item, open, depth + 1)) return false;
    }
    setDelete(open, value);
    return true;
  }

  // Objects whose content is not in their properties; JSON would silently show them as `{}`.
  const isExotic = (value) =>
    isError(value) || value instanceof Map || value instanceof Set || value instanceof RegExp || value instanceof NativePromise ||
    value instanceof NativeWeakMap || value instanceof NativeWeakSet || value instanceof ArrayBuffer || isView(value);

  // The value as JSON, or undefined if JSON does not represent it faithfully. That includes hostile
  // getters and proxies.
  function json(value) {
    try {
      return isJson(value, new NativeSet(), 0) ? stringify(value) : undefined;
    } catch (error) {
      if (inner.isFatal(error)) throw error;
      return undefined;
    }
  }

  // --- Console notation ------------------------------------------------------------------------------------------------

  function className(value) {
    try {
      const constructor = getPrototypeOf(value)?.constructor;
      return typeof constructor === 'function' ? textOf(constructor, 'name') : '';
    } catch {
      return '';
    }
  }

  function inspect(value, open, depth) {
    switch (typeof value) {
      case 'string':
        return stringify(value);
      case 'number':
        return value === 0 && 1 / value < 0 ? '-0' : toText(value);
      case 'bigint':
        return `${value}n`;
      case 'symbol':
        return symbolText(value);
      case 'function': {
        const kind = startsWith(functionText(value), 'class') ? 'class' : 'Function';
        return `[${kind} ${textOf(value, 'name') || '(anonymous)'}]`;
      }
      case 'object':
        break;
      default:
        return toText(value); // undefined, true, false
    }
    if (value === null) return 'null';
    if (setHas(open, value)) return '[Circular]';
    try {
      if (isError(value)) return depth === 0 ? errorText(value) : `[${title(value)}]`;
      if (value instanceof Date) return isNaNumber(dateValue(value)) ? dateText(value) : 'Invalid Date';
      if (value instanceof RegExp) return regexpText(value);
      if (value instanceof NativePromise) return `Promise { ${native.promiseState(value)} }`;
      if (value instanceof NativeWeakMap || value instanceof NativeWeakSet) return `${className(value)} {…}`;
      if (value instanceof ArrayBuffer) return `ArrayBuffer(${value.byteLength})`;
      if (depth >= MAX_DEPTH) return isArray(value) ? '[Array]' : `[${className(value) || 'Object'}]`;
      setAdd(open, value);
      const text = container(value, open, depth + 1);
      setDelete(open, value);
      return text;
    } catch (error) {
      if (inner.isFatal(error)) throw error;
      return `[${className(value) || 'Object'}: cannot be shown]`;
    }
  }

  function container(value, open, depth) {
    const parts = [];
    let hidden = 0;
    const add = (text) => {
      if (parts.length < MAX_ITEMS) parts[parts.length] = text;
      else hidden++;
    };
    const close = (head, left, right) => {
      if (hidden > 0) parts[parts.length] = `… ${hidden} more`;
      const body = join(parts, ', ');
      return body === '' ? `${head}${left}${right}` : `${head}${left}${left === '[' ? '' : ' '}${body}${left === '[' ? '' : ' '}${right}`;
    };
    if (isArray(value)) {
      const shown = value.length < MAX_ITEMS ? value.length : MAX_ITEMS;
      for (let i = 0; i < shown; i++) add(i in value ? inspect(value[i], open, depth) : '<empty>');
      hidden = value.length - shown;
      return close('', '[', ']');
    }
    if (value instanceof Map) {
      mapForEach(value, (item, key) => {
        if (parts.length < MAX_ITEMS) add(`${inspect(key, open, depth)} => ${inspect(item, open, depth)}`);
        else hidden++;
      });
      return close(`Map(${mapSize(value)}) `, '{', '}');
    }
    if (value instanceof Set) {
      setForEach(value, (item) => {
        if (parts.length < MAX_ITEMS) add(inspect(item, open, depth));
        else hidden++;
      });
      return close(`Set(${setSize(value)}) `, '{', '}');
    }
    const tag = isView(value) ? typedArrayTag(value) : undefined;
    if (tag !== undefined) {
      const shown = value.length < MAX_ITEMS ? value.length : MAX_ITEMS;
      for (let i = 0; i < shown; i++) add(toText(value[i]));
      hidden = value.length - shown;
      return close(`${tag}(${value.length}) `, '[', ']');
    }
    const names = keys(value);
    for (let i = 0; i < names.length && i < MAX_ITEMS; i++) add(`${label(names[i])}: ${property(value, names[i], open, depth)}`);
    hidden = names.length > MAX_ITEMS ? names.length - MAX_ITEMS : 0;
    const name = className(value);
    return close(name === '' || name === 'Object' ? '' : `${name} `, '{', '}');
  }

  // Getters are named, not run: showing a value has no side effect.
  function property(object, name, open, depth) {
    const descriptor = getOwnPropertyDescriptor(object, name);
    if (descriptor !== undefined && descriptor.get !== undefined) return '[Getter]';
    return inspect(object[name], open, depth);
  }

  const identifier = /^[A-Za-z_$][\w$]*$/;
  const matches = unbind(RegExp.prototype.exec);
  const label = (name) => (matches(identifier, name) !== null ? name : stringify(name));

  // The text that `print` shows for one value: strings as they are, the rest as JSON or in console
  // notation.
  const display = (value) => (typeof value === 'string' ? value : (json(value) ?? inspect(value, new NativeSet(), 0)));

  // --- Errors ----------------------------------------------------------------------------------------------------------

  const clip = (text) => (text.length <= MAX_ERROR_TEXT ? text : `${slice(text, 0, MAX_ERROR_TEXT)}… (${text.length} characters)`);

  const title = (error) => {
    const name = textOf(error, 'name') || 'Error';
    const message = clip(textOf(error, 'message'));
    return message === '' ? name : `${name}: ${message}`;
  };

  // The stack without the frames of the prelude: positions in the script only.
  function stackOf(error) {
    const lines = split(clip(textOf(error, 'stack')), '\n');
    const kept = [];
    for (let i = 0; i < lines.length; i++) {
      if (lines[i] !== '' && !includes(lines[i], 'construct:')) kept[kept.length] = lines[i];
    }
    return join(kept, '\n');
  }

  // An error for a reader: title, stack, cause, and collected errors.
  function errorText(error, depth = 0) {
    const stack = stackOf(error);
    return title(error) + (stack === '' ? '' : `\n${stack}`) + related(error, depth);
  }

  function related(error, depth) {
    if (depth >= 3) return '';
    let text = '';
    try {
      if (isError(error.cause)) text += `\nCaused by: ${errorText(error.cause, depth + 1)}`;
      else if (error.cause !== undefined) text += `\nCaused by: ${clip(display(error.cause))}`;
      if (isArray(error.errors)) {
        const shown = error.errors.length < 5 ? error.errors.length : 5;
        for (let i = 0; i < shown; i++) text += `\n[${i}] ${isError(error.errors[i]) ? errorText(error.errors[i], depth + 1) : clip(display(error.errors[i]))}`;
        if (error.errors.length > shown) text += `\n… ${error.errors.length - shown} more`;
      }
    } catch (failure) {
      if (inner.isFatal(failure)) throw failure;
    }
    return text;
  }

  // The description of an uncaught exception for the host.
  function describe(thrown) {
    if (!isError(thrown)) {
      return stringify({ name: 'NotAnError', message: clip(`the script threw a value that is not an Error: ${display(thrown)}`), stack: '' });
    }
    let { code, details } = { __proto__: null };
    try {
      ({ code, details } = thrown);
      if (json(details) === undefined) details = undefined;
      if (typeof code !== 'string' && typeof code !== 'number') code = undefined;
    } catch {
      code = details = undefined;
    }
    return stringify({
      name: textOf(thrown, 'name') || 'Error',
      message: clip(textOf(thrown, 'message')) + inner.hint(textOf(thrown, 'name'), textOf(thrown, 'message')),
      stack: stackOf(thrown) + related(thrown, 0),
      code: code === undefined ? undefined : toText(code),
      details,
    });
  }

  inner.display = display;
  inner.inspect = (value) => inspect(value, new NativeSet(), 0);
  inner.describe = describe;
  inner.errorText = errorText;
  // The script's result: [whether it is JSON, the text].
  inner.result = (value) => {
    const text = json(value);
    return text !== undefined ? [true, text] : [false, inspect(value, new NativeSet(), 0)];
  };
  // JavaScript cannot catch an interruption by the host. Running out of memory while formatting
  // must not be mistaken for a value that cannot be shown.
  inner.isFatal = (error) => error === null || textOf(error, 'name') === 'InternalError';
  inner.apply = apply;
})
