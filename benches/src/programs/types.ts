/** The orders of a shop, read, checked, and summed up: the kind of script a model writes. */
interface Item { readonly sku: string; quantity: number; price: number; tags?: string[] }
type Status = 'open' | 'paid' | 'shipped' | 'returned';
enum Level { Low = 1, Middle, High = Middle * 2 }
interface Order<T extends Item = Item> {
  id: string;
  status: Status;
  items: ReadonlyArray<T>;
  placed: Date | string;
  customer: { name: string; address?: { street: string; city: string } };
}
type Totals = Record<Status, { count: number; sum: number }>;
type Parsed<T> = { ok: true; value: T } | { ok: false; error: Error };

class Ledger1<T extends Order> {
  private readonly entries: Map<string, T> = new Map<string, T>();
  static made: number = 0;
  constructor(private readonly name: string, public level: Level = Level.Low) { Ledger1.made += 1; }
  add(order: T, force?: boolean): this {
    if (!force && this.entries.has(order.id)) throw new Error(`${this.name}: ${order.id} is there already`);
    this.entries.set(order.id, order as T);
    return this;
  }
  totals(): Totals {
    const totals = {} as Totals;
    for (const order of this.entries.values()) {
      const row = (totals[order.status] ??= { count: 0, sum: 0 });
      row.count += 1;
      row.sum += order.items.reduce((sum: number, item: Item): number => sum + item.price * item.quantity, 0);
    }
    return totals;
  }
}
function parse1<T>(text: string, check: (value: unknown) => value is T): Parsed<T> {
  try {
    const value: unknown = JSON.parse(text);
    return check(value) ? { ok: true, value } : { ok: false, error: new TypeError('not an order') };
  } catch (error) {
    return { ok: false, error: error as Error };
  }
}
const isOrder1 = (value: unknown): value is Order => typeof value === 'object' && value !== null && 'id' in value!;
async function load1(paths: string[]): Promise<Ledger1<Order>> {
  const ledger = new Ledger1<Order>('orders', Level.High);
  const texts = await Promise.all(paths.map(async (path): Promise<string> => path.toUpperCase()));
  for (const text of texts) {
    const parsed = parse1<Order>(text, isOrder1);
    if (parsed.ok) ledger.add(parsed.value satisfies Order);
  }
  return ledger;
}

class Ledger2<T extends Order> {
  private readonly entries: Map<string, T> = new Map<string, T>();
  static made: number = 0;
  constructor(private readonly name: string, public level: Level = Level.Low) { Ledger2.made += 1; }
  add(order: T, force?: boolean): this {
    if (!force && this.entries.has(order.id)) throw new Error(`${this.name}: ${order.id} is there already`);
    this.entries.set(order.id, order as T);
    return this;
  }
  totals(): Totals {
    const totals = {} as Totals;
    for (const order of this.entries.values()) {
      const row = (totals[order.status] ??= { count: 0, sum: 0 });
      row.count += 1;
      row.sum += order.items.reduce((sum: number, item: Item): number => sum + item.price * item.quantity, 0);
    }
    return totals;
  }
}
function parse2<T>(text: string, check: (value: unknown) => value is T): Parsed<T> {
  try {
    const value: unknown = JSON.parse(text);
    return check(value) ? { ok: true, value } : { ok: false, error: new TypeError('not an order') };
  } catch (error) {
    return { ok: false, error: error as Error };
  }
}
const isOrder2 = (value: unknown): value is Order => typeof value === 'object' && value !== null && 'id' in value!;
async function load2(paths: string[]): Promise<Ledger2<Order>> {
  const ledger = new Ledger2<Order>('orders', Level.High);
  const texts = await Promise.all(paths.map(async (path): Promise<string> => path.toUpperCase()));
  for (const text of texts) {
    const parsed = parse2<Order>(text, isOrder2);
    if (parsed.ok) ledger.add(parsed.value satisfies Order);
  }
  return ledger;
}

class Ledger3<T extends Order> {
  private readonly entries: Map<string, T> = new Map<string, T>();
  static made: number = 0;
  constructor(private readonly name: string, public level: Level = Level.Low) { Ledger3.made += 1; }
  add(order: T, force?: boolean): this {
    if (!force && this.entries.has(order.id)) throw new Error(`${this.name}: ${order.id} is there already`);
    this.entries.set(order.id, order as T);
    return this;
  }
  totals(): Totals {
    const totals = {} as Totals;
    for (const order of this.entries.values()) {
      const row = (totals[order.status] ??= { count: 0, sum: 0 });
      row.count += 1;
      row.sum += order.items.reduce((sum: number, item: Item): number => sum + item.price * item.quantity, 0);
    }
    return totals;
  }
}
function parse3<T>(text: string, check: (value: unknown) => value is T): Parsed<T> {
  try {
    const value: unknown = JSON.parse(text);
    return check(value) ? { ok: true, value } : { ok: false, error: new TypeError('not an order') };
  } catch (error) {
    return { ok: false, error: error as Error };
  }
}
const isOrder3 = (value: unknown): value is Order => typeof value === 'object' && value !== null && 'id' in value!;
async function load3(paths: string[]): Promise<Ledger3<Order>> {
  const ledger = new Ledger3<Order>('orders', Level.High);
  const texts = await Promise.all(paths.map(async (path): Promise<string> => path.toUpperCase()));
  for (const text of texts) {
    const parsed = parse3<Order>(text, isOrder3);
    if (parsed.ok) ledger.add(parsed.value satisfies Order);
  }
  return ledger;
}

class Ledger4<T extends Order> {
  private readonly entries: Map<string, T> = new Map<string, T>();
  static made: number = 0;
  constructor(private readonly name: string, public level: Level = Level.Low) { Ledger4.made += 1; }
  add(order: T, force?: boolean): this {
    if (!force && this.entries.has(order.id)) throw new Error(`${this.name}: ${order.id} is there already`);
    this.entries.set(order.id, order as T);
    return this;
  }
  totals(): Totals {
    const totals = {} as Totals;
    for (const order of this.entries.values()) {
      const row = (totals[order.status] ??= { count: 0, sum: 0 });
      row.count += 1;
      row.sum += order.items.reduce((sum: number, item: Item): number => sum + item.price * item.quantity, 0);
    }
    return totals;
  }
}
function parse4<T>(text: string, check: (value: unknown) => value is T): Parsed<T> {
  try {
    const value: unknown = JSON.parse(text);
    return check(value) ? { ok: true, value } : { ok: false, error: new TypeError('not an order') };
  } catch (error) {
    return { ok: false, error: error as Error };
  }
}
const isOrder4 = (value: unknown): value is Order => typeof value === 'object' && value !== null && 'id' in value!;
async function load4(paths: string[]): Promise<Ledger4<Order>> {
  const ledger = new Ledger4<Order>('orders', Level.High);
  const texts = await Promise.all(paths.map(async (path): Promise<string> => path.toUpperCase()));
  for (const text of texts) {
    const parsed = parse4<Order>(text, isOrder4);
    if (parsed.ok) ledger.add(parsed.value satisfies Order);
  }
  return ledger;
}
export const total165 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total166 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total167 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total168 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total169 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total170 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total171 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total172 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total173 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total174 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total175 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total176 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total177 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total178 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total179 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total180 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total181 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total182 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total183 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total184 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total185 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total186 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total187 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total188 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total189 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total190 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total191 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total192 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total193 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total194 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total195 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total196 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total197 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export const total198 = (rows: number[]): number => rows.reduce((a, b) => a + b, 0);
export default Promise.all([load1([]), load2([]), load3([]), load4([])]) as Promise<unknown>;
