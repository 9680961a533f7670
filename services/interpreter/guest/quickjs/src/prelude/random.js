// Randomness. The built-in generator was seeded while the guest booted and would give every run the
// same numbers. This one is seeded by the host for each run, so that runs differ and one run can be
// repeated exactly.
(function (native, inner) {
  'use strict';
  const { fillRandom, random } = native;
  const { slice } = String.prototype;
  const bytesToText = inner.unbind(slice);
  const isView = ArrayBuffer.isView;
  const Bytes = Uint8Array;
  const NativeTypeError = TypeError;
  const NativeRangeError = RangeError;

  inner.define(Math, 'random', random);

  const hex = [];
  for (let i = 0; i < 256; i++) hex[i] = bytesToText((i + 256).toString(16), 1);

  const crypto = {
    getRandomValues(array) {
      if (!isView(array) || array instanceof DataView || array instanceof Float32Array || array instanceof Float64Array) {
        throw new NativeTypeError('getRandomValues needs an integer typed array');
      }
      if (array.byteLength > 65536) throw new NativeRangeError('getRandomValues fills at most 65536 bytes at once');
      fillRandom(new Bytes(array.buffer, array.byteOffset, array.byteLength));
      return array;
    },
    randomUUID() {
      const b = new Bytes(16);
      fillRandom(b);
      b[6] = (b[6] & 15) | 64;
      b[8] = (b[8] & 63) | 128;
      let text = '';
      for (let i = 0; i < 16; i++) text += (i === 4 || i === 6 || i === 8 || i === 10 ? '-' : '') + hex[b[i]];
      return text;
    },
  };
  inner.global('crypto', crypto);

  // The built-in `performance` counts from the build of the guest. This one counts from its first
  // use.
  const now = Date.now;
  let origin;
  inner.global('performance', {
    get timeOrigin() { return (origin ??= now()); },
    now() {
      const time = now();
      return time - (origin ??= time);
    },
  });
})
