/* What the comparison needs of Berkeley DB, whose interface is functions in structures that differ
 * with its configuration: see berkeley.rs. All return 0 or an error of the library. */

#include <db.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CACHE_BYTES (512u << 20)
#define LOCKS 200000

struct berkeley {
    DB_ENV *env;
    DB *db;
};

/* The commits of this environment are written to the log, and synced if `durable`. */
int berkeley_open(struct berkeley *out, const char *dir, int btree, int durable, int create)
{
    int err = db_env_create(&out->env, 0);
    if (err != 0)
        return err;
    DB_ENV *env = out->env;
    env->set_cachesize(env, 0, CACHE_BYTES, 1);
    env->set_lk_max_locks(env, LOCKS);
    env->set_lk_max_objects(env, LOCKS);
    env->set_lk_max_lockers(env, 2000);
    env->set_tx_max(env, 2000);
    env->set_lg_bsize(env, 8u << 20);
    env->set_lk_detect(env, DB_LOCK_DEFAULT);
    if (!durable)
        env->set_flags(env, DB_TXN_WRITE_NOSYNC, 1);
    env->log_set_config(env, DB_LOG_AUTO_REMOVE, 1);
    uint32_t flags = DB_INIT_MPOOL | DB_INIT_LOCK | DB_INIT_LOG | DB_INIT_TXN | DB_THREAD;
    err = env->open(env, dir, flags | (create ? DB_CREATE : 0), 0600);
    if (err != 0)
        return err;
    err = db_create(&out->db, env, 0);
    if (err != 0)
        return err;
    uint32_t db_flags = DB_AUTO_COMMIT | DB_THREAD | (create ? DB_CREATE : 0);
    return out->db->open(out->db, NULL, "data.db", NULL, btree ? DB_BTREE : DB_HASH, db_flags, 0600);
}

void berkeley_close(struct berkeley *b)
{
    if (b->db)
        b->db->close(b->db, 0);
    if (b->env)
        b->env->close(b->env, 0);
}

int berkeley_begin(struct berkeley *b, void **txn)
{
    return b->env->txn_begin(b->env, NULL, (DB_TXN **)txn, 0);
}


int berkeley_commit(void *txn, int durable)
{
    DB_TXN *t = txn;
    return t->commit(t, durable ? DB_TXN_SYNC : DB_TXN_WRITE_NOSYNC);
}

void berkeley_abort(void *txn)
{
    DB_TXN *t = txn;
    t->abort(t);
}

static DBT bytes_of(const void *start, uint32_t len)
{
    DBT dbt;
    memset(&dbt, 0, sizeof dbt);
    dbt.data = (void *)start;
    dbt.size = len;
    return dbt;
}

/* Copies up to `room` bytes; `*len` is how many there are. A read in a transaction takes the lock that
 * the write behind it needs. */
int berkeley_get(struct berkeley *b, void *txn, const void *key, uint32_t key_len, void *value,
                 uint32_t room, uint32_t *len)
{
    DBT k = bytes_of(key, key_len), v = bytes_of(value, 0);
    v.flags = DB_DBT_USERMEM;
    v.ulen = room;
    int err = b->db->get(b->db, txn, &k, &v, txn ? DB_RMW : 0);
    *len = v.size;
    return err;
}

int berkeley_put(struct berkeley *b, void *txn, const void *key, uint32_t key_len, const void *value,
                 uint32_t len)
{
    DBT k = bytes_of(key, key_len), v = bytes_of(value, len);
    return b->db->put(b->db, txn, &k, &v, 0);
}

/* Calls `visit` with each record, several at a time from the library. */
int berkeley_each(struct berkeley *b, void *buffer, uint32_t buffer_len,
                  void (*visit)(void *, const void *, uint32_t, const void *, uint32_t), void *state)
{
    DBC *cursor;
    int err = b->db->cursor(b->db, NULL, &cursor, 0);
    if (err != 0)
        return err;
    for (;;) {
        DBT k = bytes_of(NULL, 0), v = bytes_of(buffer, 0);
        v.flags = DB_DBT_USERMEM;
        v.ulen = buffer_len;
        err = cursor->get(cursor, &k, &v, DB_NEXT | DB_MULTIPLE_KEY);
        if (err != 0)
            break;
        void *at;
        DB_MULTIPLE_INIT(at, &v);
        for (;;) {
            void *key, *value;
            uint32_t key_len, value_len;
            DB_MULTIPLE_KEY_NEXT(at, &v, key, key_len, value, value_len);
            if (at == NULL)
                break;
            visit(state, key, key_len, value, value_len);
        }
    }
    cursor->close(cursor);
    return err == DB_NOTFOUND ? 0 : err;
}

int berkeley_is_deadlock(int err) { return err == DB_LOCK_DEADLOCK || err == DB_LOCK_NOTGRANTED; }
int berkeley_is_absent(int err) { return err == DB_NOTFOUND; }
int berkeley_is_too_small(int err) { return err == DB_BUFFER_SMALL; }
const char *berkeley_text(int err) { return db_strerror(err); }
const char *berkeley_version(void) { return db_version(NULL, NULL, NULL); }
