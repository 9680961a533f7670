// atob, btoa, TextEncoder, TextDecoder and structuredClone.
(function (native, inner) {
  'use strict';
  const { unbind, isPlain } = inner;
  const toText = String;
  const Bytes = Uint8Array;
  const isView = ArrayBuffer.isView;
  const NativeMap = Map;
  const NativeTypeError = TypeError;
  const NativeRangeError = RangeError;
  const Exception = DOMException;
  const toWellFormed = unbind(String.prototype.toWellFormed);
  const toLowerCase = unbind(String.prototype.toLowerCase);
  const trim = unbind(String.prototype.trim);
  const setBytes = unbind(Bytes.prototype.set);

  inner.global('btoa', function btoa(text) {
    const encoded = native.base64Encode(toText(text));
    if (encoded === null) throw new Exception('the text has characters above U+00FF; encode it with TextEncoder first', 'InvalidCharacterError');
    return encoded;
  });
  inner.global('atob', function atob(text) {
    const decoded = native.base64Decode(toText(text));
    if (decoded === null) throw new Exception('the text is not correctly encoded base64', 'InvalidCharacterError');
    return decoded;
  });

  class TextEncoder {
    get encoding() { return 'utf-8'; }
    encode(text = '') { return native.utf8Encode(toWellFormed(toText(text))); }
    encodeInto(text, target) {
      const source = toText(text);
      let read = 0;
      let written = 0;
      while (read < source.length) {
        const size = source.codePointAt(read) > 0xffff ? 2 : 1;
        const bytes = native.utf8Encode(toWellFormed(source.slice(read, read + size)));
        if (written + bytes.length > target.length) break;
        setBytes(target, bytes, written);
        read += size;
        written += bytes.length;
      }
      return { read, written };
    }
  }

  const bytesOf = (input) => {
    if (input === undefined) return new Bytes(0);
    if (isView(input)) return new Bytes(input.buffer, input.byteOffset, input.byteLength);
    if (input instanceof ArrayBuffer) return new Bytes(input);
    throw new NativeTypeError('TextDecoder.decode needs an ArrayBuffer or a view of one');
  };

  class TextDecoder {
    #fatal;
    #ignoreBOM;
    #rest = new Bytes(0); // The beginning of a character whose end is in the next chunk.
    #started = false;
    constructor(label = 'utf-8', options = {}) {
      const name = toLowerCase(trim(toText(label)));
      if (name !== 'utf-8' && name !== 'utf8' && name !== 'unicode-1-1-utf-8') throw new NativeRangeError(`only utf-8 is supported, not ${name}`);
      this.#fatal = !!options?.fatal;
      this.#ignoreBOM = !!options?.ignoreBOM;
    }
    get encoding() { return 'utf-8'; }
    get fatal() { return this.#fatal; }
    get ignoreBOM() { return this.#ignoreBOM; }
    decode(input, options = {}) {
      let bytes = bytesOf(input);
      if (this.#rest.length > 0) {
        const joined = new Bytes(this.#rest.length + bytes.length);
        setBytes(joined, this.#rest, 0);
        setBytes(joined, bytes, this.#rest.length);
        bytes = joined;
        this.#rest = new Bytes(0);
      }
      const stream = !!options?.stream;
      if (stream) {
        const whole = native.utf8Whole(bytes);
        this.#rest = bytes.slice(whole);
        bytes = bytes.subarray(0, whole);
      }
      let text = native.utf8Decode(bytes, this.#fatal);
      if (text === null) throw new NativeTypeError('the bytes are not valid utf-8');
      if (!this.#started && !this.#ignoreBOM && text[0] === '\ufeff') text = text.slice(1);
      this.#started = stream;
      return text;
    }
  }
  inner.global('TextEncoder', TextEncoder);
  inner.global('TextDecoder', TextDecoder);

  // --- structuredClone -------------------------------------------------------------------------------------------------

  const errorTypes = { __proto__: null, Error, EvalError, RangeError, ReferenceError, SyntaxError, TypeError, URIError };
  const refuse = (value) => {
    throw new Exception(`${inner.inspect(value)} could not be cloned`, 'DataCloneError');
  };

  function clone(value, seen) {
    if (typeof value === 'symbol' || typeof value === 'function') refuse(value);
    if (typeof value !== 'object' || value === null) return value;
    if (seen.has(value)) return seen.get(value);
    const remember = (copy) => {
      seen.set(value, copy);
      return copy;
    };
    if (Array.isArray(value)) {
      const copy = remember(new Array(value.length));
      for (const name of Object.keys(value)) copy[name] = clone(value[name], seen);
      return copy;
    }
    if (value instanceof Date) return remember(new Date(value.getTime()));
    if (value instanceof RegExp) return remember(new RegExp(value.source, value.flags));
    if (value instanceof Boolean || value instanceof Number || value instanceof String || value instanceof BigInt) return remember(Object(value.valueOf()));
    if (value instanceof Map) {
      const copy = remember(new NativeMap());
      for (const [key, item] of [...value]) copy.set(clone(key, seen), clone(item, seen));
      return copy;
    }
    if (value instanceof Set) {
      const copy = remember(new Set());
      for (const item of [...value]) copy.add(clone(item, seen));
      return copy;
    }
    if (value instanceof ArrayBuffer) return remember(value.slice(0));
    if (isView(value)) {
      const buffer = clone(value.buffer, seen);
      const length = value instanceof DataView ? value.byteLength : value.length;
      return remember(new value.constructor(buffer, value.byteOffset, length));
    }
    if (value instanceof Error) {
      const copy = remember(Object.create((errorTypes[value.name] ?? Error).prototype));
      for (const name of ['message', 'stack', 'cause']) {
        if (Object.hasOwn(value, name)) inner.define(copy, name, clone(value[name], seen));
      }
      return copy;
    }
    if (value instanceof Promise || value instanceof WeakMap || value instanceof WeakSet) refuse(value);
    const copy = remember({});
    for (const name of Object.keys(value)) copy[name] = clone(value[name], seen);
    return copy;
  }
  inner.global('structuredClone', function structuredClone(value) { return clone(value, new NativeMap()); });
})
